#!/usr/bin/env bash
# Slurm 22.05.8: a fence of PMIx lets a rank of one node go on before the rank of the other node has come to it.
#
# Seen with slurm-wlm 22.05.8-4+deb12u3, libpmix2 4.2.2-1+deb12u1, Python 3.11, on Debian 12, 2 ranks on 2 nodes (two slurmd
# on one host) under srun --mpi=pmix: PMIx_Fence is a barrier, and returns success. With SLURM_PMIX_FENCE at its default,
# mixed, and with tree, one of the two ranks leaves nearly each fence, from the first on, while the other rank's own count
# says that it has not entered: in three runs 1,987 to 2,000 of 4,000 returns were too early. SLURM_PMIX_FENCE_BARRIER=true
# changes nothing; with ring none was. Open MPI's MPI_Init relies on this fence, and so does a rank that reads what
# another has put into a file before it. Nothing is said.
# Needs Debian 12 and root: it puts packages over /usr in a mount namespace of its own; nothing is installed.
set -euo pipefail
if [ -z "${OVER_USR-}" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    mkdir -p "$folder/archives/partial" "$folder/packages/usr"
    slurm=22.05.8-4+deb12u3
    apt-get install --quiet=2 --yes --reinstall --download-only --no-install-recommends \
        -o Debug::NoLocking=1 -o APT::Sandbox::User=root -o Dir::Cache::Archives="$folder/archives" \
        slurmd="$slurm" slurmctld="$slurm" slurm-client="$slurm" slurm-wlm-basic-plugins="$slurm" \
        munge=0.5.15-2+deb12u1 libpmix2=4.2.2-1+deb12u1 libpmix-dev=4.2.2-1+deb12u1
    for archive in "$folder"/archives/*.deb; do
        dpkg -x "$archive" "$folder/packages"
    done
    OVER_USR=$folder unshare --mount-proc --pid --fork --kill-child bash "$0"
    exit
fi

cd "$OVER_USR"
mount -t overlay overlay -o "lowerdir=$OVER_USR/packages/usr:/usr" /usr
cat >fences.py <<'PYTHON'
import ctypes
import mmap
import os
import sys

pmix = ctypes.CDLL("libpmix.so.2")
pmix.PMIx_Init.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
pmix.PMIx_Fence.argtypes = [ctypes.c_void_p, ctypes.c_size_t] * 2
pmix.PMIx_Finalize.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
with open(sys.argv[1], "r+b") as file:
    entered = (ctypes.c_int64 * size).from_buffer(mmap.mmap(file.fileno(), mmap.PAGESIZE))
assert pmix.PMIx_Init(ctypes.create_string_buffer(4096), None, 0) == 0
early = 0
for number in range(1, int(sys.argv[2]) + 1):
    entered[rank] = number
    assert pmix.PMIx_Fence(None, 0, None, 0) == 0
    early += min(entered) < number
print(early, flush=True)
assert pmix.PMIx_Finalize(None, 0) == 0
PYTHON

read -r control first second < <(python3 - <<'PYTHON'
import socket

sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
print(*(each.getsockname()[1] for each in sockets))
PYTHON
)
host=$(hostname -s)
export SLURM_CONF=$PWD/slurm.conf
cat >slurm.conf <<SLURM
ClusterName=two
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$control
SlurmUser=root
AuthInfo=socket=$PWD/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
TmpFS=$PWD/tmp.%n
StateSaveLocation=$PWD/state
SlurmctldPidFile=$PWD/slurmctld.pid
SlurmctldLogFile=$PWD/slurmctld.log
SlurmdSpoolDir=$PWD/%n
SlurmdPidFile=$PWD/%n.pid
SlurmdLogFile=$PWD/%n.log
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$first CPUs=2
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$second CPUs=2
PartitionName=all Nodes=ALL Default=YES
SLURM
mkdir state n1 n2 tmp.n1 tmp.n2
(umask 077; head -c 64 /dev/urandom >key)
munged --foreground --force --socket="$PWD/munge.socket" --key-file="$PWD/key" --pid-file="$PWD/munged.pid" \
    --log-file="$PWD/munged.log" --seed-file="$PWD/seed" >daemons.log 2>&1 &
for daemon in "slurmctld -D -c" "slurmd -D -N n1" "slurmd -D -N n2"; do
    $daemon >>daemons.log 2>&1 &
done
for _ in $(seq 60); do
    [ "$(sinfo -h -o '%T %D' 2>&1)" != "idle 2" ] || break
    sleep 1
done

# Prints how many of the fences of both ranks returned early.
early() {
    head -c 4096 /dev/zero >entered
    env "$@" srun --mpi=pmix --nodes=2 --ntasks-per-node=1 python3 fences.py "$PWD/entered" 2000 |
        awk '{ sum += $1 } END { print sum; exit NR != 2 }'
}
for setting in SLURM_PMIX_FENCE=mixed SLURM_PMIX_FENCE=tree "SLURM_PMIX_FENCE=mixed SLURM_PMIX_FENCE_BARRIER=true" \
    SLURM_PMIX_FENCE=ring; do
    seen=$(early $setting)
    echo "$setting: $seen of 4000 fences return before the other rank has come to them"
    if [ "$setting" = SLURM_PMIX_FENCE=ring ]; then
        [ "$seen" = 0 ] || { echo "changed: ring"; exit 1; }
    else
        [ "$seen" -gt 0 ] || { echo "changed: $setting"; exit 1; }
    fi
done
