"""Slurm as two nodes on this machine, for the length of a `with` block."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn, Self

from daemons import Daemons, require_programs

from hvdtrain.launch.cluster_environment import free_ports

REQUIRED = "HVDTRAIN_TEST_SLURM"
_NODES = ("n1", "n2")
_START_SECONDS = 120
_COMMAND_SECONDS = 120  # of Slurm's own

# A job that is requeued waits until credentials have expired, two minutes by default.
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
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=2
KillWait=3
ReturnToService=2
TmpFS={directory}/tmp.%n
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdSpoolDir={directory}/spool.%n
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmdLogFile={directory}/slurmd.%n.log
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=60 State=UP
"""


def require_slurm() -> None:
    programs = ("slurmctld", "slurmd", "sbatch", "munged")
    require_programs(programs, "slurm-wlm munge", REQUIRED)


class Slurm:
    """A controller and two nodes of four cores, with ports and files of their own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        own = {"SLURM_CONF": str(directory / "slurm.conf")}
        self._env = {**os.environ, **own}
        self._daemons = Daemons(own, self._fail)

    def __enter__(self) -> Self:
        host, ports = socket.gethostname().partition(".")[0], free_ports(1 + len(_NODES))
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4"
            for name, port in zip(_NODES, ports[1:], strict=True)
        )
        for name in ("state", *(f"{kind}.{node}" for kind in ("tmp", "spool") for node in _NODES)):
            (self._directory / name).mkdir()
        configuration = _CONFIGURATION.format(
            host=host, port=ports[0], nodes=nodes, directory=self._directory
        )
        (self._directory / "slurm.conf").write_text(configuration)
        with self._stack as stack:
            stack.enter_context(self._daemons)
            self._start_munge()
            self._daemons.start("slurmctld", "-D", "-c")
            for node in _NODES:
                self._daemons.start("slurmd", "-D", "-N", node)
            self._daemons.wait(
                lambda: self.ask("sinfo", "-h", "-o", "%T %D") == "idle 2", _START_SECONDS
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        # Jobs first: a daemon that is gone cannot end them.
        self.ask("scancel", "--user=root", "--signal=KILL", "--full")
        self._stack.close()

    def submit(self, script: Path, env: Mapping[str, str]) -> str:
        words = ["sbatch", "--parsable", f"--chdir={script.parent}", str(script)]
        done = subprocess.run(
            words,
            env={**self._env, **env},
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            check=True,
        )
        return done.stdout.strip()

    def ask(self, *words: str) -> str:
        """Return what a command of Slurm prints; nothing where it fails."""
        done = subprocess.run(
            words, env=self._env, capture_output=True, text=True, timeout=_COMMAND_SECONDS
        )
        return done.stdout.strip()

    def about(self, job: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "-o", "show", "job", job)))

    def wait_for_state(self, job: str, states: Sequence[str], timeout_seconds: float) -> None:
        self._daemons.wait(lambda: self.about(job).get("JobState") in states, timeout_seconds)

    def wait_for_text(self, path: Path, text: str, timeout_seconds: float) -> None:
        self._daemons.wait(lambda: path.exists() and text in path.read_text(), timeout_seconds)

    def _start_munge(self) -> None:
        """Start what proves who asks Slurm for something: a port is open to everybody."""
        folder = self._directory / "munge"
        folder.mkdir(mode=0o755)
        (folder / "key").touch(0o600)
        (folder / "key").write_bytes(os.urandom(64))
        files = [f"--{name}-file={folder / name}" for name in ("key", "pid", "log", "seed")]
        self._daemons.start(
            "munged", "--foreground", "--force", f"--socket={folder / 'socket'}", *files
        )
        self._daemons.wait((folder / "socket").exists, _START_SECONDS)

    def _fail(self, reason: str) -> NoReturn:
        files = [*self._directory.parent.glob("*.out"), self._directory / "slurmctld.log"]
        tails = [f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in files]
        jobs = self.ask("scontrol", "-o", "show", "jobs")
        raise AssertionError("\n".join([reason, jobs, *tails]))
