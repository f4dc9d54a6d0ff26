"""Run a launcher to its end: signals go on to it, and nothing outlives it or this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

__all__ = ["bound_to_this_process", "run_to_the_end"]

_PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
# For orphans that clear up by themselves: those that watch over shared memory, for example.
_GRACE_SECONDS = 1.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def run_to_the_end(
    argv: Sequence[str], environ: Mapping[str, str], descriptors: Sequence[int] = ()
) -> int:
    """Run a launcher and return its exit code, as a shell counts: 128 + N for signal N.

    A job that was asked to end by a signal, and did not end well, has the code of that signal,
    whatever the launcher says. Signals stay blocked: this process is to end with that code, and one
    that comes too late for the launcher must not keep it from clearing up.

    Args:
        argv: the launcher's.
        environ: its environment.
        descriptors: that it inherits.

    Raises:
        OSError: it cannot be started.
    """
    # What is ignored here, as under nohup, stays so.
    passed_on = {number for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN}
    # It would wait for ever where its own parent has it ignored: then none is sent.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on | {signal.SIGCHLD})
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    begin = bound_to_this_process(before)
    others = _children()  # of the shell whose place this process has taken
    process = subprocess.Popen(argv, env=environ, pass_fds=descriptors, preexec_fn=begin)
    asked = _wait(process, passed_on)
    code = process.returncode
    if code != 0:
        _end_orphans(others)
    if code != 0 and asked is not None:
        return 128 + asked
    return code if code >= 0 else 128 - code


def _wait(process: subprocess.Popen[bytes], passed_on: set[signal.Signals]) -> int | None:
    """Wait for the end; return the last signal that asked for it."""
    asked = None
    while not _has_ended(process):
        found = signal.sigwaitinfo(passed_on | {signal.SIGCHLD})
        if found.si_signo == signal.SIGCHLD:
            continue
        if found.si_signo in _ENDING:
            asked = found.si_signo
        # The launcher has what comes from the terminal, where Ctrl-C goes to both.
        if found.si_code <= 0:
            process.send_signal(found.si_signo)
    return asked


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Reap whatever child has ended: orphans of the launcher are children of this process."""
    while process.returncode is None:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return False
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
    return True


def _end_orphans(others: set[int]) -> None:
    """End what a launcher has left behind on this host, and all that descends from it.

    Mostly nothing is left. A launcher that is killed, or that fails while it ends, leaves ranks.
    """
    for pid in _children() - others:
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    while pids := _children() - others:
        late = time.monotonic() > deadline
        for pid in pids:
            if late:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0 if late else os.WNOHANG)
        time.sleep(0.02)


def _children() -> set[int]:
    # Not every kernel lists them in /proc/self/task/*/children.
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it is gone meanwhile
            after_name = path.read_text(errors="replace").rpartition(")")[2].split()
            if int(after_name[1]) == os.getpid():
                found.add(int(path.parent.name))
    return found


def bound_to_this_process(
    mask: set[int | signal.Signals], lifeline: int | None = None
) -> Callable[[], None]:
    """Return what a child does first: have the kernel end it when this process is killed.

    Args:
        mask: the signals that the child blocks.
        lifeline: of the child's session, which kills a child that SIGTERM does not end.
    """
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl

    def begin() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)
        if lifeline is not None:
            os.write(lifeline, b"%d\n" % os.getpid())
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return begin
