"""Slurm as two nodes on this machine, for the length of a `with` block."""

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest
from job import Job
from ranks import start

from hvdtrain.launch.cluster_environment import free_ports

REQUIRED = "HVDTRAIN_TEST_SLURM"
_NODES = ("n1", "n2")
_START_SECONDS = _COMMAND_SECONDS = 120

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
    missing = [n for n in ("slurmctld", "slurmd", "sbatch", "munged") if find_program(n) is None]
    reason = f"no {', '.join(missing)} here: apt-get install slurm-wlm munge" if missing else ""
    if not reason and os.geteuid() != 0:
        reason = "only root can start slurmctld"
    if reason and os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{REQUIRED}=1, but {reason}")
    if reason:
        pytest.skip(reason)


def find_program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


class Slurm(ExitStack):
    """Its daemons end, the last one first, with the `with` block."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory, self._own = directory, {"SLURM_CONF": str(directory / "slurm.conf")}
        self._jobs: list[Job] = []

    def __enter__(self) -> Self:
        with ExitStack() as failing:
            failing.callback(self.close)
            self._begin()
            failing.pop_all()
        return self

    def _start(self, program: str, *words: str) -> None:
        self._jobs.append(self.enter_context(start([find_program(program), *words], env=self._own)))

    def ask(self, *words: object, check: bool = False) -> str:
        done = subprocess.run(
            list(map(str, words)),
            env={**os.environ, **self._own},
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
        )
        assert not (check and done.returncode), f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def wait(self, test: Callable[[], bool], timeout_seconds: float = 300) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not test():
            for daemon in self._jobs:
                if daemon.process.poll() is not None:
                    daemon.fail("a daemon has ended")
            if time.monotonic() > deadline:
                logs = [*self._directory.parent.glob("*.out"), self._directory / "slurmctld.log"]
                tails = [f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in logs]
                raise AssertionError("\n".join([f"not after {timeout_seconds} s", *tails]))
            time.sleep(0.1)

    def _begin(self) -> None:
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
