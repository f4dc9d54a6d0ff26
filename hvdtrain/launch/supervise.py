"""Run a launcher to its end, pass signals on to it, and leave no process behind."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
# Time for orphans that end by themselves, such as those that watch over shared memory.
_GRACE_SECONDS = 1.0
_PERIOD_SECONDS = 0.5
# An mpirun that is told to end while its ranks do sometimes never ends.
_TERMINATED_SECONDS = 10.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Launches:
    """Runs launchers one after the other, passes signals on to them, and ends what they leave.

    Signals stay blocked from the first run on: this process is about to end with the code that
    run() returns, and a late signal must not interrupt its cleanup.
    """

    def __init__(self, descriptors: Sequence[int] = ()) -> None:
        self.asked: int | None = None
        self._descriptors = descriptors
        # Signals that are ignored here, as under nohup, stay ignored.
        self._passed_on = {n for n in _PASSED_ON if signal.getsignal(n) != signal.SIG_IGN}
        # If the parent had it ignored, none would be sent, and the wait would never end.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        blocked = self._passed_on | {signal.SIGCHLD}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._others = _children()  # of the shell that this process has replaced

    def run(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        is_lost: Callable[[], bool] | None = None,
    ) -> int:
        """Run a launcher and return its exit code as a shell does: 128 + N for signal N.

        If a signal asked the job to end and it did not end well, the code is that of the signal,
        whatever the launcher returns.
        """
        process = self.start(argv, environ)
        self.asked = _wait(process, self._passed_on, is_lost)
        code = process.returncode
        if code != 0:
            self.end_orphans()
        if code != 0 and self.asked is not None:
            return 128 + self.asked
        return code if code >= 0 else 128 - code

    def start(
        self, argv: Sequence[str], environ: Mapping[str, str], quiet: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start a process that ends with this one."""
        stream = subprocess.DEVNULL if quiet else None
        return subprocess.Popen(
            argv,
            env=environ,
            stdin=stream,
            stdout=stream,
            stderr=stream,
            pass_fds=self._descriptors,
            preexec_fn=bound_to_this_process(self._mask),
        )

    def end_orphans(self) -> None:
        """End the processes that a launcher has left behind on this host, and their descendants.

        Usually there are none. A launcher that is killed, or that fails while it exits, leaves
        ranks.
        """
        for pid in _children() - self._others:
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_SECONDS
        while pids := _children() - self._others:
            late = time.monotonic() > deadline
            for pid in pids:
                if late:
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0 if late else os.WNOHANG)
            time.sleep(0.02)

    def waiting(self) -> int | None:
        """Return a signal that has asked the job to end since the last run, or None."""
        return min(signal.sigpending() & self._passed_on & _ENDING, default=None)


def _wait(
    process: subprocess.Popen[bytes],
    passed_on: set[signal.Signals],
    is_lost: Callable[[], bool] | None,
) -> int | None:
    """Wait for the end; return the last signal that asked for it, or None."""
    asked, deadline = None, math.inf
    while not _has_ended(process):
        found = signal.sigtimedwait(passed_on | {signal.SIGCHLD}, _PERIOD_SECONDS)
        if is_lost is not None and is_lost():
            process.terminate()
            is_lost, deadline = None, time.monotonic() + _TERMINATED_SECONDS
        if time.monotonic() > deadline:
            process.kill()
        if found is None or found.si_signo == signal.SIGCHLD:
            continue
        if found.si_signo in _ENDING:
            asked = found.si_signo
        # The terminal sends Ctrl-C to both processes, so only signals from processes are passed on.
        if found.si_code <= 0:
            process.send_signal(found.si_signo)
    return asked


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Reap children that have ended; orphans of the launcher are children of this process."""
    while process.returncode is None:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return False
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
    return True


def _children() -> set[int]:
    # Not every kernel lists them in /proc/self/task/*/children.
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended in the meantime
            after_name = path.read_text(errors="replace").rpartition(")")[2].split()
            if int(after_name[1]) == os.getpid():
                found.add(int(path.parent.name))
    return found


def bound_to_this_process(
    mask: set[int | signal.Signals], lifeline: int | None = None
) -> Callable[[], None]:
    """Return a function for a child to call first, so that the kernel ends it with this process."""
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl

    def begin() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)
        if lifeline is not None:
            os.write(lifeline, b"%d\n" % os.getpid())
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return begin
