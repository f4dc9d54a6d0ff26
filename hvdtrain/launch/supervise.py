"""Run a launcher to its end, pass signals on to it, and leave no process or file behind."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import STOPPING, UsageError

# Where Open MPI 5 keeps the files of its jobs, and those of one on this host.
_SESSIONS, SESSION = "PRTE_MCA_prte_tmpdir_base", "PRTE_MCA_prte_local_tmpdir_base"

_SHELL = "/bin/sh"
# The subshell is an orphan, and survives signals that are sent to all processes of a job. Its input
# ends when this process does. From the lifeline it reads the launcher's process ID, then the end of
# the launcher.
_CLEANUP = """
exec 3<&0 4<"/dev/fd/$1"
(
    trap '' HUP INT TERM
    read -r launcher <&4
    read -r _ <&3 && exit
    timeout -s KILL "$2" cat <&4 || kill -KILL "$launcher"
    rm -rf -- "$0"
) &
"""
# Time for the launcher to end after this process. An mpirun of Open MPI 5 that is told to end while
# its ranks end by themselves may deadlock on a lock that it holds itself.
_LAUNCHER_SECONDS = 10.0


@dataclass(frozen=True)
class Session:
    """The resources of one job."""

    folder: str
    lifeline: int


@contextmanager
def session_folder(environ: Mapping[str, str]) -> Iterator[Session]:
    """Make the directory, which is removed with its block, or with this process and the launcher.

    An mpirun that is killed leaves files named by its process ID, on which a later one with that ID
    fails: so each has a directory of its own.
    """
    base = environ.get(_SESSIONS)
    parent = os.path.abspath(base) if base else None  # the cleanup runs in another directory
    try:
        temporary = tempfile.TemporaryDirectory(
            prefix="hvdtrain-run-", dir=parent, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise UsageError(f"cannot create a directory: {error}") from None
    with temporary as folder, ExitStack() as ends:
        waiting, block = os.pipe()  # no other process has the write end
        listening, lifeline = os.pipe()
        for end in (waiting, block, listening, lifeline):
            ends.callback(os.close, end)
        try:
            subprocess.run(
                [_SHELL, "-c", _CLEANUP, folder, str(listening), str(_LAUNCHER_SECONDS)],
                stdin=waiting,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                pass_fds=[listening],
                start_new_session=True,  # Ctrl-C must not reach it
                check=False,
            )
        except OSError as error:
            raise UsageError(f"cannot start {_SHELL}, which removes {folder}: {error}") from None
        try:
            yield Session(folder, lifeline)
        finally:
            with contextlib.suppress(OSError):  # it has been ended from outside
                os.write(block, b"\n")


PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
# Time for orphans that end by themselves, such as those that watch over shared memory.
_GRACE_SECONDS = 1.0
_PERIOD_SECONDS = 0.5
# An mpirun that is told to end while its ranks do sometimes never ends.
_TERMINATED_SECONDS = 10.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


# What Open MPI says, between two lines of dashes, of the rank that has ended a job.
_RULE = rb"-{74}\n"
_BEGINS = (
    _RULE + rb"(?:MPI_ABORT was invoked|(?:prterun|mpirun) (?:has exited due to|detected that one))"
)
_BLOCK = re.compile(_BEGINS + rb".*?" + _RULE, re.DOTALL)
# The end of what was read, if it may become a block.
_OPEN = re.compile(_BEGINS + rb".*\Z|" + _RULE + rb"[^\n]{0,40}\Z|-{1,74}\Z", re.DOTALL)
_RANK = re.compile(rb"(?:invoked on|process) rank (\d+)|Process name: \S*,(\d+)\]")
# With these a rank gives its reason itself.
_REASON = re.compile(rb"hvdtrain: |\[rank \d+/\d+\] |Traceback \(most recent")
_LONGEST_REASON = 32


class Launches:
    """Runs launchers one after the other, passes signals on to them, and ends what they leave.

    Signals stay blocked from the first run on: this process is about to end with the code that
    run() returns, and a late signal must not interrupt its cleanup. `interrupts` are what a
    launcher gets for the first, second ... Ctrl-C in place of SIGINT; `verbose` prints all it says.
    """

    def __init__(
        self,
        descriptors: Sequence[int] = (),
        interrupts: Sequence[signal.Signals] = (),
        verbose: bool = True,
    ) -> None:
        self.asked: int | None = None
        # Who has ended the job, if nobody said why. Open MPI may name no rank if all have ended.
        self.silent: str | None = None
        self._verbose, self._reader = verbose, threading.Thread()
        self._descriptors, self._interrupts = descriptors, list(interrupts)
        # Signals that are ignored here, as under nohup, stay ignored.
        self._passed_on = {n for n in PASSED_ON if signal.getsignal(n) != signal.SIG_IGN}
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

        If a signal asked the job to end and it did not end well, or if it was Ctrl-C and replaced,
        the code is that of the signal, whatever the launcher returns.
        """
        process = self.start(argv, environ)
        self.asked = _wait(process, self._passed_on, self._interrupts, is_lost)
        code = process.returncode
        if code != 0:
            self.end_orphans()
        if self._reader.ident is not None:
            self._reader.join(_GRACE_SECONDS)  # what has left the job may keep the pipe open
        if code < 0:  # it was the launcher itself
            self.silent = None
        if self.asked is not None and (
            code != 0 or (self._interrupts and self.asked == signal.SIGINT)
        ):
            return 128 + self.asked
        return code if code >= 0 else 128 - code

    def start(
        self, argv: Sequence[str], environ: Mapping[str, str], quiet: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start a process that ends with this one."""
        stream = subprocess.DEVNULL if quiet else None
        # The terminal sends Ctrl-C to the launcher, too; a quiet one gets no signal from here.
        blocked = {signal.SIGINT} if self._interrupts and not quiet else set()
        with ExitStack() as ends:
            errors, kept = stream, list(self._descriptors)
            if not (quiet or self._verbose):
                # The launcher has both ends: it must end its ranks also if this process is killed.
                readable, errors = os.pipe()
                ends.callback(os.close, errors)
                kept.append(readable)
                self._reader = threading.Thread(target=self._pass_on, args=[readable], daemon=True)
            process = subprocess.Popen(
                argv,
                env=environ,
                stdin=stream,
                stdout=stream,
                stderr=errors,
                pass_fds=kept,
                preexec_fn=bound_to_this_process(self._mask | blocked),
            )
        if errors is not stream:
            self._reader.start()
        return process

    def _pass_on(self, readable: int) -> None:
        """Print what a launcher writes to stderr, without such blocks, until its end."""
        held, written, blocks, has_reason = b"", b"", b"", False
        while part := os.read(readable, 65536):
            held += part
            blocks += b"".join(_BLOCK.findall(held))
            held = _BLOCK.sub(b"", held)
            found = _OPEN.search(held)
            end = len(held) if found is None else found.start()
            written = written[-_LONGEST_REASON:] + held[:end]
            has_reason = has_reason or _REASON.search(written) is not None
            _write(held[:end])
            held = held[end:]
        _write(held)
        named = _RANK.search(blocks)
        if named is not None and not has_reason:
            self.silent = f"rank {int(named[1] or named[2])}"
        elif not (written or held):
            self.silent = "a rank"

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


def _write(data: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more
        while data:
            data = data[os.write(2, data) :]


def _wait(
    process: subprocess.Popen[bytes],
    passed_on: set[signal.Signals],
    interrupts: list[signal.Signals],
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
        if found.si_signo == signal.SIGINT and interrupts:
            sent = interrupts.pop(0) if len(interrupts) > 1 else interrupts[0]
            process.send_signal(sent)
            if sent == signal.SIGUSR1:
                with contextlib.suppress(OSError):  # Ctrl-C has ended what reads it, too
                    print(STOPPING, file=sys.stderr, flush=True)
            continue
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
