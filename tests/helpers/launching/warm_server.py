"""A process that has imported what ranks import, and forks a rank whenever it is asked to.

warm_server.py LISTENER MODULES...: see warm.py. It ends when its standard input does.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_LARGEST_REQUEST_BYTES = 1 << 20
# Where /proc/self/stat says that these lie in memory.
_COMMAND_FIELDS, _ENVIRONMENT_FIELDS = (47, 48), (49, 50)
_PR_SET_PDEATHSIG = 1


class Server:
    """Forks ranks, and tells those who have asked for them how they end."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener.fileno(), selectors.EVENT_READ, self._fork)
        self._selector.register(0, selectors.EVENT_READ, lambda: os._exit(0))

    def serve(self) -> dict[str, Any]:
        while True:
            # One at a time: what is done for a descriptor may close those that come after it.
            (key, _), *_ = self._selector.select()
            if request := key.data():
                return dict(request)

    def _fork(self) -> dict[str, Any] | None:
        connection, _ = self._listener.accept()
        with connection:
            text, streams, _, _ = socket.recv_fds(connection, _LARGEST_REQUEST_BYTES, 3)
            asking = connection.detach()
        own, pid = os.getpid(), os.fork()
        if pid == 0:
            _end_with(own)
            self._close()
            os.close(asking)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
        for stream in streams:
            os.close(stream)
        if pid == 0:
            return dict(json.loads(text))
        ended = os.pidfd_open(pid)

        def kill() -> None:
            self._selector.unregister(asking)
            signal.pidfd_send_signal(ended, signal.SIGKILL)

        def tell() -> None:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(OSError):
                os.write(asking, str(code).encode())
            for descriptor in {asking, ended} & self._selector.get_map().keys():
                self._selector.unregister(descriptor)
            os.close(asking)
            os.close(ended)

        self._selector.register(asking, selectors.EVENT_READ, kill)
        self._selector.register(ended, selectors.EVENT_READ, tell)
        return None

    def _close(self) -> None:
        for key in self._selector.get_map().values():
            if key.fd != 0:
                os.close(key.fd)
        self._listener.detach()
        self._selector.close()


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


def become(request: dict[str, Any]) -> None:
    """Take over the environment, directory and arguments of the process that stands for a rank."""
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["arguments"]
    sys.orig_argv = [sys.executable, *sys.argv]
    is_module = sys.argv[0] == "-m"
    first = "" if is_module else str(Path(sys.argv[0]).resolve().parent)
    sys.path[:0] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # else the same on all ranks
    _show(_COMMAND_FIELDS, sys.orig_argv)
    _show(_ENVIRONMENT_FIELDS, [f"{name}={text}" for name, text in os.environ.items()])


def _show(fields: tuple[int, int], texts: list[str]) -> None:
    """Have /proc say what it would of a process that was started with these texts."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = (int(stat[field - 2]) for field in fields)
    size = end - begin
    shown = b"".join(text.encode() + b"\0" for text in texts)[: size - 1]
    ctypes.memmove(begin, shown.ljust(size, b"\0"), size)


def run() -> None:
    if sys.argv[0] == "-m":
        name = sys.argv.pop(0) and sys.argv[0]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    main = ModuleType("__main__")
    main.__file__ = sys.argv[0]
    sys.modules["__main__"] = main
    exec(compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec"), main.__dict__)


if __name__ == "__main__":
    del sys.path[0]  # this folder
    sys.path[:] = [folder for folder in sys.path if folder != os.environ["PYTHONPATH"]]
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    become(Server(socket.socket(fileno=int(sys.argv[1]))).serve())
    run()
