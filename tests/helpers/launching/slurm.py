"""Slurm as two nodes on this machine, for the length of a `with` block."""

import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from daemons import Scheduler, require_programs

from hvdtrain.launch.cluster_environment import free_ports

REQUIRED = "HVDTRAIN_TEST_SLURM"
_NODES = ("n1", "n2")
_START_SECONDS = 120

# A job that is requeued waits until credentials have expired, two minutes by default. A job that
# has ended is asked for later, and would be forgotten after five.
_CONFIGURATION = """\
ClusterName=hvdtrain
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthInfo=socket={directory}/munge/socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=2
KillWait=3
MinJobAge=36000
ReturnToService=2
TmpFS={directory}/tmp.%n
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdSpoolDir={spool}/%n
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmdLogFile={directory}/slurmd.%n.log
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=60 State=UP
"""


def require_slurm() -> None:
    # Slurm's plugin for PMIx loads the library by a name that only the development package has.
    library = next(Path("/usr/lib").glob("*/pmix2/lib/libpmix.so"), None)
    programs = ["slurmctld", "slurmd", "sbatch", "munged", *(["libpmix.so"] if not library else [])]
    require_programs(programs, "slurm-wlm munge libpmix-dev", REQUIRED)


class Slurm(Scheduler):
    def __init__(self, directory: Path, cpus: int = 4, gpus: int = 0) -> None:
        super().__init__(directory, {"SLURM_CONF": str(directory / "slurm.conf")}, {})
        self._cpus, self._gpus = cpus, gpus

    def _begin(self) -> None:
        host, ports = socket.gethostname().partition(".")[0], free_ports(1 + len(_NODES))
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
            f"CPUs={self._cpus} Gres=gpu:{self._gpus} Feature=gpu"
            for name, port in zip(_NODES, ports[1:], strict=True)
        )
        # Sockets lie there, whose paths may have 108 letters.
        spool = self.enter_context(TemporaryDirectory(prefix="slurm-"))
        for folder in ("state", *(f"tmp.{node}" for node in _NODES)):
            (self._directory / folder).mkdir()
        for node in _NODES:
            Path(spool, node).mkdir()
        configuration = _CONFIGURATION.format(
            host=host, port=ports[0], nodes=nodes, directory=self._directory, spool=spool
        )
        (self._directory / "slurm.conf").write_text(configuration)
        # Slurm counts files that are no devices, too, and says so in its log.
        for number in range(self._gpus):
            (self._directory / f"gpu{number}").touch()
        (self._directory / "gres.conf").write_text(
            f"Name=gpu File={self._directory}/gpu[0-{self._gpus - 1}]\n" if self._gpus else ""
        )
        self._start_munge()
        self._start("slurmctld", "-D", "-c")
        for node in _NODES:
            self._start("slurmd", "-D", "-N", node)
        self.wait(lambda: self.ask("sinfo", "-h", "-o", "%T %D") == "idle 2", _START_SECONDS)
        # Jobs first: a daemon that is gone cannot end them.
        self.callback(self.ask, "scancel", "--user=root", "--signal=KILL", "--full")

    def submit(self, script: Path, env: Mapping[str, str]) -> str:
        """Submit a script, to run in its folder with these variables; return the job's number."""
        words = [f"{name}={value}" for name, value in env.items()]
        words += ["sbatch", "--parsable", f"--chdir={script.parent}", str(script)]
        return self.ask("env", *words, check=True)

    def about(self, job: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "-o", "show", "job", job)))

    def wait_for_state(self, job: str, states: Sequence[str], timeout_seconds: float = 300) -> None:
        self.wait(lambda: self.about(job).get("JobState") in states, timeout_seconds)

    def wait_for_text(self, path: Path, text: str, timeout_seconds: float = 300) -> None:
        self.wait(lambda: path.exists() and text in path.read_text(), timeout_seconds)

    def _start_munge(self) -> None:
        """Start what proves who asks Slurm for something: a port is open to everybody."""
        folder = self._directory / "munge"
        folder.mkdir(mode=0o755)
        (folder / "key").touch(0o600)
        (folder / "key").write_bytes(os.urandom(64))
        files = [f"--{name}-file={folder / name}" for name in ("key", "pid", "log", "seed")]
        self._start("munged", "--foreground", "--force", f"--socket={folder / 'socket'}", *files)
        self.wait((folder / "socket").exists, _START_SECONDS)

    def _logs(self) -> Iterable[Path]:
        return [*self._directory.parent.glob("*.out"), self._directory / "slurmctld.log"]
