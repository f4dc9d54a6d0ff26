"""The exit guard, through which every exit of a rank passes after init().

A rank that fails ends the whole job, and one that ends makes sure that the others end as well:
otherwise they would wait for it until the job's time limit.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import io
import os
import re
import signal
import stat
import sys
import termios
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

import hvdtrain
from hvdtrain.errors import (
    EXIT_CRASH,
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    EXIT_TERMINATED,
    ConnectionLostError,
    HvdtrainError,
    PeerFailureError,
    RanksLostError,
    UsageError,
)
from hvdtrain.topology import Topology
from hvdtrain.world import SUPERVISOR

_PACKAGE = Path(hvdtrain.__file__).parent
# sysconfig knows them too, but reads a dozen files.
_STANDARD = Path(os.__file__).parent
_SCRIPTS = (Path(sys.prefix, "bin"), Path(sys.prefix, "local", "bin"))  # the latter on Debian
_INSTALLED = {"site-packages", "dist-packages"}
# Frameworks that call hvdtrain, as in backward().
_FRAMEWORKS = ("torch", "tensorflow", "keras", "jax")
_COLORS = re.compile(r"\x1b\[[\d;]*m")
# A frame in the text of an error, and the lines of source below it.
_TOLD_FRAME = re.compile(
    r'(?:^from user code:\n)?^ *File "([^"]+)", line (\d+), in (.+)\n(?:    .*\n)*', re.MULTILINE
)
# After these words the error itself follows the frames; other texts only point to a place.
_BEFORE_FRAMES = re.compile("Traceback|in user code:")


def format_error(error: BaseException) -> str:
    """Return the traceback of an error, with its last line.

    That of an error of hvdtrain's ends in the line that called hvdtrain, or a framework that did:
    how hvdtrain found the error tells nothing about its cause. If the error has a cause in
    hvdtrain, or no script has led to it, everything is shown.
    """
    told = traceback.TracebackException.from_exception(error)
    paths = [frame.filename for frame in told.stack]
    if (
        isinstance(error, HvdtrainError)
        and error.__cause__ is None
        and any(is_script(path) for path in paths)
    ):
        loaded = (getattr(sys.modules.get(name), "__file__", None) for name in _FRAMEWORKS)
        inner = (_PACKAGE, *(Path(file).parent for file in loaded if file is not None))
        while not is_script(paths[-1]) and _is_internal(paths[-1], inner):
            del paths[-1], told.stack[-1]
    return "".join(told.format())


def own_frame(error: BaseException, verbose: bool = False) -> str:
    """Return an error in one line: the innermost line of the user's own that led to it, and why.

    The traceback follows if it is `verbose`.
    """
    frames = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]
    told = _COLORS.sub("", "".join(traceback.format_exception_only(error)))
    # Of another process, such as one that loads data, or of a graph.
    if inner := list(_TOLD_FRAME.finditer(told)):
        frames += [(frame[1], int(frame[2]), frame[3]) for frame in inner]
        ended = told[inner[-1].end() :] if _BEFORE_FRAMES.search(told[: inner[0].start()]) else ""
        told = ended if ended.strip() else _TOLD_FRAME.sub("", told)
    own = [frame for frame in frames if is_script(frame[0])] or frames[-1:]
    place = "{}:{} in {}: ".format(*own[-1]) if own else ""
    line = place + " ".join(told.split())
    return f"{line}\n{format_error(error).rstrip()}" if verbose else line


def is_internal(error: BaseException) -> bool:
    """Return whether hvdtrain itself raised an error, outside of any code of the user's."""
    paths = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    own = [path for path in paths if not _is_internal(path, ())]  # without Python's library
    return bool(own) and Path(own[-1]).is_relative_to(_PACKAGE) and not any(map(is_script, paths))


def is_script(path: str) -> bool:
    """Return whether a file is the user's own: not hvdtrain's, installed, or Python's."""
    if path.startswith("<frozen "):
        return False
    file = Path(path)
    folders = (_PACKAGE, _STANDARD, *_SCRIPTS)
    return not (
        any(file.is_relative_to(folder) for folder in folders) or _INSTALLED & set(file.parts)
    )


def _is_internal(path: str, inner: tuple[Path, ...]) -> bool:
    """Return whether a file belongs to hvdtrain, a framework or Python's library."""
    file = Path(path)
    if any(file.is_relative_to(folder) for folder in inner) or path.startswith("<frozen "):
        return True
    return file.is_relative_to(_STANDARD) and not _INSTALLED & set(file.parts)


_LONGEST_SECONDS = 1.0
_POLL_SECONDS = 1e-3


def flush_output() -> None:
    # The exception hook of torch.distributed collects what the hook before it writes, to add a
    # prefix, but an exit does not return to it.
    held, own = sys.stderr, sys.__stderr__
    if isinstance(held, io.StringIO) and own is not None:
        with contextlib.suppress(OSError, ValueError):
            own.write(held.getvalue())
            own.flush()
        held.seek(0)
        held.truncate()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def drain_output() -> None:
    """Flush, and wait for up to a second until pipes have been read.

    MPICH's mpiexec drops output that it has not read when a rank aborts the job.
    """
    flush_output()
    deadline = time.monotonic() + _LONGEST_SECONDS
    while any(map(_unread_bytes, (1, 2))) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _unread_bytes(descriptor: int) -> int:
    """Return the number of unread bytes in a pipe; 0 if it is not an open pipe."""
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return 0
        return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4), sys.byteorder)
    except OSError:
        return 0


# Names of hvdtrain's own threads begin with this; the job does not continue without them.
OWN_THREADS = "hvdtrain-"

# How long a rank that waits for one that left has to report so before the job ends.
_REPORT_SECONDS = 1.0

# How long the launcher has to see that another rank ended, and after that to end this one.
_SIGHT_SECONDS, _LAUNCHER_SECONDS = 30.0, 5.0

# How long a program has to end by itself after an engine call has failed.
_GRACE_SECONDS = 2.0


class ExitGuard:
    """Handles every way in which this process can end, from install() to uninstall()."""

    def __init__(
        self,
        topology: Topology,
        leave: Callable[[], None],
        abort: Callable[[int], None],
        any_thread: bool,
        save: Callable[[], None],
        note: Callable[[str, str], None],
    ) -> None:
        self._topology = topology
        self._any_thread = any_thread
        self._leave = leave
        self._abort, self._save, self._note = abort, save, note
        self._process_id = os.getpid()
        self._terminated = False
        self._leaving = False
        self._timer: threading.Timer | None = None  # started by end_soon()
        self._excepthook = sys.excepthook
        self._thread_excepthook = threading.excepthook

    def install(self) -> None:
        """Install the exception hooks, an exit handler, and a SIGTERM handler if there is none."""
        self._excepthook, sys.excepthook = sys.excepthook, self._on_exception
        self._thread_excepthook = threading.excepthook
        threading.excepthook = self._on_thread_exception
        atexit.register(self._on_exit)
        if self._may_handle_signals() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_terminate)

    def uninstall(self) -> None:
        """Restore what install() replaced, unless it has been replaced again since."""
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        if threading.excepthook == self._on_thread_exception:
            threading.excepthook = self._thread_excepthook
        atexit.unregister(self._on_exit)
        if self._may_handle_signals() and signal.getsignal(signal.SIGTERM) == self._on_terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _may_handle_signals(self) -> bool:
        return threading.current_thread() is threading.main_thread()

    def _is_rank(self) -> bool:
        return os.getpid() == self._process_id  # a forked child inherits the hooks

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not self._is_rank():
            self._excepthook(kind, error, trace)
            return
        if isinstance(error, ConnectionLostError):
            self.note_error(error)  # before the launcher may end this rank
        if isinstance(error, KeyboardInterrupt):
            if self._topology.rank == 0:
                self._say("interrupted")
            self.note_error(error)
            self._end(EXIT_INTERRUPTED)
        elif isinstance(error, UsageError | ConnectionLostError | RanksLostError):
            # A traceback would not help: the line that raised it is not the cause.
            if self._timer is not None:
                self._timer.cancel()  # this error ends the job itself
            _leave_it_to_the_launcher(error)
            self._say(str(error))
            if not isinstance(error, ConnectionLostError):
                self.note_error(error)
            self._end(error.exit_code)
        else:
            self._say(format_error(error))
            self.note_error(error)
            self._end(error.exit_code if isinstance(error, HvdtrainError) else EXIT_CRASH)

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        # Threads of the program may fail.
        own = args.thread is not None and args.thread.name.startswith(OWN_THREADS)
        if not self._is_rank() or not (own or self._any_thread):
            self._thread_excepthook(args)
        elif args.exc_value is not None and args.exc_type is not SystemExit:
            self._on_exception(args.exc_type, args.exc_value, args.exc_traceback)

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        if not self._is_rank() or self._leaving:
            _die_of(number)
        self._terminated = True
        self._note("signal", signal.Signals(number).name)
        raise SystemExit(EXIT_TERMINATED)  # so that `finally` blocks remove half-written files

    def _on_exit(self) -> None:
        if not self._is_rank():
            return
        self._leaving = True  # another signal ends it at once
        if self._terminated:
            try:
                self._save()
            finally:
                _die_of(signal.SIGTERM)  # without a message; the launcher ends the other ranks
        self._note("left", "")
        try:
            self._leave()
        except HvdtrainError as error:
            _leave_it_to_the_launcher(error)
            self._say(str(error))
            time.sleep(_REPORT_SECONDS)
            self._end(error.exit_code)
        except BaseException as error:
            self._on_exception(type(error), error, error.__traceback__)

    def fail(self, error: BaseException) -> None:
        """End the job at once, as if an error had not been caught."""
        self._on_exception(type(error), error, error.__traceback__)

    def end_soon(self, reason: str) -> None:
        """End the job in two seconds, unless the program ends by itself before that."""
        self._timer = timer = threading.Timer(_GRACE_SECONDS, self._end_for, [reason])
        timer.name, timer.daemon = f"{OWN_THREADS}end", True
        try:
            timer.start()
        except RuntimeError:  # Python is exiting and starts no threads any more
            self._end_for(reason)

    def _end_for(self, reason: str) -> None:
        self._say(f"{reason}. The job ends: other ranks would wait for this one forever")
        self._note("follows", reason)
        self._end(EXIT_CRASH)

    def note_error(self, error: BaseException) -> None:
        """Note an error of this rank in the flight record."""
        with contextlib.suppress(Exception):  # its own text may fail
            follows = isinstance(error, PeerFailureError)
            self._note("follows" if follows else "error", own_frame(error))

    def _say(self, text: str) -> None:
        write_message(self._topology.title, text)

    def _end(self, code: int) -> None:
        try:
            if code != EXIT_REQUEUE:
                _tell_failure()
            drain_output()
        finally:
            self._abort(code)


def _leave_it_to_the_launcher(error: HvdtrainError) -> None:
    """Wait for the launcher to end this rank if another one has ended, which tells the cause."""
    if not isinstance(error, ConnectionLostError):
        return
    parent, now = os.getppid(), time.monotonic()
    latest, seen = now + _SIGHT_SECONDS, now
    while os.getppid() == parent and now < min(latest, seen + _LAUNCHER_SECONDS):
        if _has_ended_child(parent):
            seen = now
        time.sleep(0.05)
        now = time.monotonic()


def _has_ended_child(process: int) -> bool:
    """Return whether a process has not yet seen that a child of it has ended."""
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has seen it by now
            for child in path.read_text().split():
                if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    return True
    return False


def write_message(title: str, text: str) -> None:
    """Write a message to stderr, with a prefix before each line."""
    texts = text.rstrip("\n").split("\n")
    lines = [line if line.startswith(title) else f"{title} {line}" for line in texts]
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        sys.stderr.write("\n".join(lines) + "\n")


def install_plain_excepthook(silent: bool = False) -> None:
    """Make an uncaught HvdtrainError end this process with one line and its exit code.

    For the time before a world exists, when there are no other ranks to abort. Any other error ends
    the process, too, because an engine may wait at exit for ranks that have no world either.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, HvdtrainError):
            previous(kind, error, trace)
        elif not silent:
            sys.stderr.write(f"hvdtrain: {error}\n")
        _tell_failure()
        flush_output()
        os._exit(error.exit_code if isinstance(error, HvdtrainError) else EXIT_CRASH)

    sys.excepthook = hook


def _tell_failure() -> None:
    if SUPERVISOR in os.environ:
        with contextlib.suppress(OSError):  # all files that may be open are
            from hvdtrain.milestones import FAILED, report

            report(FAILED, os.environ)


def _die_of(number: int) -> None:
    flush_output()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
