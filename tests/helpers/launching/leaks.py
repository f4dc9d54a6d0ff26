"""What a test must not leave behind: environment variables, directory, threads, processes."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

# In the environment of all that a test starts, so that it is found whoever its parent is by now.
MARK = "HVDTRAIN_TEST_SESSION"

# Set by pytest, by scikit-learn and by torch when they are imported, for good reasons.
_TOLERATED_VARIABLES = {
    "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR",
}  # fmt: skip
# One for the whole session: Python's own, and what forks ranks.
_TOLERATED_PROCESSES = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "warm_server.py",
)
# Processes that are none of ours and never will be: a machine may have hundreds, and they are
# looked at several times a test.
_OTHERS: set[int] = set()


@dataclass(frozen=True)
class Snapshot:
    environment: Mapping[str, str]
    directory: str
    threads: frozenset[threading.Thread]
    processes: Mapping[int, str]

    @classmethod
    def take(cls) -> Self:
        return cls(
            environment=dict(os.environ),
            directory=os.getcwd(),
            threads=frozenset(threading.enumerate()),
            processes=_processes(),
        )


def leaks(before: Snapshot, patience_seconds: float) -> list[str]:
    """Return one line per leak, giving threads and processes some time to end by themselves."""
    deadline = time.monotonic() + patience_seconds
    while _new_threads(before) or _new_processes(before):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    lines = [f"variable {name}" for name in _changed_variables(before)]
    if os.getcwd() != before.directory:
        lines.append(f"working directory {os.getcwd()}")
    lines += [f"thread {thread.name}" for thread in _new_threads(before)]
    return lines + [f"process {pid}: {text}" for pid, text in _new_processes(before).items()]


def restore(before: Snapshot) -> None:
    """Undo what a test leaked, threads excepted, so that the tests after it do not pay for it."""
    for name in _changed_variables(before):
        if name in before.environment:
            os.environ[name] = before.environment[name]
        else:
            del os.environ[name]
    os.chdir(before.directory)
    for pid in _new_processes(before):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _processes() -> dict[int, str]:
    """Return the command line, by process id, of live children and of all that bear the mark."""
    found: dict[int, str] = {}
    alive = {int(entry.name) for entry in os.scandir("/proc") if entry.name.isdecimal()}
    _OTHERS.intersection_update(alive)
    for pid in alive - _OTHERS - {os.getpid()}:
        # It may end while it is looked at, or belong to another user.
        with contextlib.suppress(OSError):
            if _is_ours(directory := Path("/proc", str(pid))):
                command = (directory / "cmdline").read_bytes().replace(b"\0", b" ")
                found[pid] = command.decode(errors="replace").strip()
            else:
                _OTHERS.add(pid)
    return {
        pid: command
        for pid, command in found.items()
        if not any(name in command for name in _TOLERATED_PROCESSES)
    }


def _is_ours(directory: Path) -> bool:
    state, parent = (directory / "stat").read_text().rpartition(")")[2].split()[:2]
    if state == "Z":
        return False
    mark = f"{MARK}={os.environ[MARK]}".encode()
    return int(parent) == os.getpid() or mark in (directory / "environ").read_bytes().split(b"\0")


def _changed_variables(before: Snapshot) -> list[str]:
    then, now = before.environment, os.environ
    names = (then.keys() | now.keys()) - _TOLERATED_VARIABLES
    return sorted(name for name in names if then.get(name) != now.get(name))


def _new_threads(before: Snapshot) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in before.threads]


def _new_processes(before: Snapshot) -> dict[int, str]:
    return {pid: text for pid, text in _processes().items() if pid not in before.processes}
