"""A scheduler on this machine: whether its programs are here, and the lives of its daemons."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn, Self

import pytest
from job import Job
from ranks import start

_COMMAND_SECONDS = 120  # of the scheduler's own


def require_programs(programs: Sequence[str], package: str, required: str) -> None:
    missing = [name for name in programs if find_program(name) is None]
    reason = f"no {', '.join(missing)} here: apt-get install {package}" if missing else ""
    if not reason and os.geteuid() != 0:
        reason = f"only root can start {programs[0]}"
    if reason and os.environ.get(required) == "1":
        pytest.fail(f"{required}=1, but {reason}")
    if reason:
        pytest.skip(reason)


def job_script(directory: Path, name: str, scheduler: str, *words: object) -> Path:
    """Write the script that `hvdtrain job` prints."""
    options = [scheduler, "--name", name, *map(str, words)]
    command = [sys.executable, "-m", "hvdtrain", "job", *options]
    script = directory / f"{name}.sh"
    with script.open("w") as file:
        subprocess.run(command, stdout=file, timeout=300, check=True)
    return script


def find_program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


class Scheduler(ExitStack):
    """A scheduler whose daemons end, the last one first, with the `with` block."""

    def __init__(self, directory: Path, env: Mapping[str, str], more: Mapping[str, str]) -> None:
        super().__init__()
        self._directory, self._own, self._env = directory, env, {**os.environ, **env, **more}
        self._jobs: list[Job] = []

    def __enter__(self) -> Self:
        with ExitStack() as failing:
            failing.callback(self.close)
            self._begin()
            failing.pop_all()
        return self

    def _begin(self) -> None:
        raise NotImplementedError

    def _logs(self) -> Iterable[Path]:
        raise NotImplementedError

    def _start(self, program: str, *words: str) -> Job:
        self._jobs.append(self.enter_context(start([find_program(program), *words], env=self._own)))
        return self._jobs[-1]

    def ask(self, *words: object, check: bool = False) -> str:
        done = subprocess.run(
            list(map(str, words)),
            env=self._env,
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
                self._fail(f"not after {timeout_seconds} s")
            time.sleep(0.1)

    def _fail(self, reason: str) -> NoReturn:
        files = [path for path in self._logs() if path.exists()]
        tails = [f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in files]
        raise AssertionError("\n".join([reason, *tails]))
