"""The daemons of a scheduler on this machine: whether there are any, and their lives."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import NoReturn, Self

import pytest
from job import Job
from ranks import start


def require_programs(programs: Sequence[str], package: str, required: str) -> None:
    """Skip the test where daemons cannot be started; fail it where a variable is set to 1."""
    missing = [name for name in programs if find_program(name) is None]
    reason = f"no {', '.join(missing)} here: apt-get install {package}" if missing else ""
    if not reason and os.geteuid() != 0:
        reason = f"only root can start {programs[0]}"
    if reason and os.environ.get(required) == "1":
        pytest.fail(f"{required}=1, but {reason}")
    if reason:
        pytest.skip(reason)


def find_program(name: str) -> str | None:
    """Return the path of a program, which may be one for root."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


class Daemons:
    """Daemons that end, the last one first, with the `with` block."""

    def __init__(self, env: Mapping[str, str], fail: Callable[[str], NoReturn]) -> None:
        self._env, self._fail = env, fail
        self._jobs: list[Job] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, program: str, *words: str) -> Job:
        daemon = start([find_program(program), *words], env=self._env)
        self._jobs.append(self._stack.enter_context(daemon))
        return daemon

    def wait(self, test: Callable[[], bool], timeout_seconds: float) -> None:
        """Wait until something holds; a daemon that ends before fails the test."""
        deadline = time.monotonic() + timeout_seconds
        while not test():
            for daemon in self._jobs:
                if daemon.process.poll() is not None:
                    daemon.fail("a daemon has ended")
            if time.monotonic() > deadline:
                self._fail(f"not after {timeout_seconds} s")
            time.sleep(0.1)
