"""Start an elastic job again when the launcher has given it up."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from hvdtrain.errors import EXIT_CRASH, EXIT_REQUEUE
from hvdtrain.launch.cluster_environment import own_addresses
from hvdtrain.launch.hosts.host import Host
from hvdtrain.launch.launchers.choice import Launcher
from hvdtrain.launch.launchers.request import LaunchRequest, has_allocation
from hvdtrain.launch.supervise import SESSION, Launches
from hvdtrain.milestones import (
    BEGAN,
    CONTINUES,
    ENDED,
    FAILED,
    INITIALIZED,
    LOST,
    RESTARTS,
    SAVED,
    STARTED,
)
from hvdtrain.topology import LOOPBACK
from hvdtrain.world import SUPERVISOR

# Starts a program for a request, with its output discarded.
Starter = Callable[[LaunchRequest], "subprocess.Popen[bytes]"]

# The mpirun of Open MPI 5.0.11 at times never ends if its program ends at once: on two busy cores
# in 13 of 90 restarts with `true`, in none of 64 with this.
_TRIAL = ("sleep", "0.5")
_TRIAL_SECONDS = (5.0, 20.0)
_PERIOD_SECONDS = 0.05


def answering(request: LaunchRequest, start: Starter, folder: Path) -> tuple[Host, ...]:
    """Return the hosts of a request on which the launcher can start a program."""
    alone = replace(request, program=_TRIAL, per_node=None, exports={}, elastic=False)
    alone = replace(alone, ranks=1, log_folder=None)

    answers, tried = set[Host](), request.hosts
    for seconds in _TRIAL_SECONDS:
        trials = {}
        for host in tried:
            file = folder / f"trial.{request.hosts.index(host)}"
            trials[host] = start(replace(on_hosts(alone, (host,), file), ranks=1))
        deadline = time.monotonic() + seconds
        while any(trial.poll() is None for trial in trials.values()):
            if time.monotonic() > deadline:
                break
            time.sleep(_PERIOD_SECONDS)
        answers |= {host for host, trial in trials.items() if trial.poll() == 0}
        tried = tuple(host for host, trial in trials.items() if trial.poll() is None)
        for host in tried:
            trials[host].kill()
            trials[host].wait()
    return tuple(host for host in request.hosts if host in answers)


def on_hosts(request: LaunchRequest, hosts: Sequence[Host], file: Path) -> LaunchRequest:
    """Return a request for ranks on some of its hosts, as many as these have slots for."""
    ranks, places = request.ranks, _places(request, hosts)
    if ranks is not None and len(hosts) < len(request.hosts):
        share = ranks * len(hosts) // len(request.hosts)
        ranks = min(ranks, share if places is None else places)
    changed = replace(request, ranks=ranks, hosts=tuple(hosts))
    if request.hostfile is None:
        return changed
    lines = []
    for host in hosts:
        slots = [] if host.slots is None else [f"slots={host.slots}"]
        lines.append(" ".join([host.login, *slots, *host.others]) + "\n")
    file.write_text("".join(lines), encoding="ascii")
    return replace(changed, hostfile=str(file))


def _places(request: LaunchRequest, hosts: Sequence[Host]) -> int | None:
    slots = [request.per_node or host.slots for host in hosts]
    known = [count for count in slots if count is not None]
    return sum(known) if len(known) == len(slots) else None


_KEY_BYTES = 16
_LONGEST_BYTES = 8192  # with a path
_BACKLOG = 4096
# A rank reports at once when it has connected.
_SILENT_SECONDS = 10.0


class MilestoneListener:
    """Collects what ranks report; the system keeps it until it is asked for."""

    def __init__(self, remote: bool) -> None:
        self._socket = socket.create_server(("" if remote else LOOPBACK, 0), backlog=_BACKLOG)
        self._socket.setblocking(False)
        port = self._socket.getsockname()[1]
        places = own_addresses() if remote else [LOOPBACK]
        self._places = ",".join(f"{place}:{port}" for place in places)
        self._open: dict[socket.socket, float] = {}  # with the time when each was opened
        self._held: set[socket.socket] = set()  # by ranks that are in init()
        self.checkpoints: list[str] = []  # the first and the newest that ranks told of; "": none
        self.renew()

    def renew(self) -> None:
        """Forget all ranks, and hear only those that are given the new `address`."""
        for connection in self._open:
            connection.close()
        self._open, self._held, self.began = {}, set(), 0
        self._key = secrets.token_hex(_KEY_BYTES)
        self.address = f"{self._key}@{self._places}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in (self._socket, *self._open):
            connection.close()

    def heard(self) -> set[str]:
        """Return the milestones of ranks since the last call; LOST if one ended within init().

        A rank that has begun holds its connection until the end of init().
        """
        found, now = set[str](), time.monotonic()
        with suppress(OSError):  # there are no more, or too many files are open
            while True:
                connection, _ = self._socket.accept()
                connection.setblocking(False)
                self._open[connection] = now
        for connection, opened in self._open.copy().items():
            with suppress(BlockingIOError):
                found |= self._read(connection)
            silent = connection in self._open and connection not in self._held
            if silent and now - opened > _SILENT_SECONDS:
                self._close(connection)
        return found

    def _close(self, connection: socket.socket) -> None:
        self._held.discard(connection)
        del self._open[connection]
        connection.close()

    def _read(self, connection: socket.socket) -> set[str]:
        """Return what a rank has reported, and forget a connection that has ended."""
        try:
            text = connection.recv(_LONGEST_BYTES)
        except BlockingIOError:
            raise
        except OSError:
            text = b""
        if not text:
            found = {LOST} if connection in self._held else set()
            self._close(connection)
            return found
        pairs = [line.partition(b" ") for line in text.splitlines()]
        own = self._key.encode()
        told = [os.fsdecode(name) for key, _, name in pairs if secrets.compare_digest(key, own)]
        found = {name.partition(" ")[0] for name in told}
        if found & {CONTINUES, SAVED}:
            self.checkpoints = [*self.checkpoints[:1], told[0].partition(" ")[2]]
        if BEGAN in found:
            self.began += 1
            self._held.add(connection)
        if INITIALIZED in found:
            self._held.discard(connection)
        return found


_MOST_IN_VAIN = 3
# Ranks of the same host notice a loss themselves. Others may be in init(): they go without it.
_JOIN_SECONDS = 10.0
# Ranks that have not begun so long after the first one have ended in Python's own start.
_BEGIN_SECONDS = 60.0


class ElasticJob:
    """A job whose ranks continue when others are killed; it is started again if all are lost."""

    def __init__(self, launcher: Launcher, request: LaunchRequest, least: int) -> None:
        self._launcher, self._request, self._least = launcher, request, least
        self._restarts, self._in_vain = 0, 0
        self._trained = False
        self._heard: set[str] = set()
        self._first: float | None = None  # when the first rank had begun
        self._lost_since: float | None = None
        self._checkpoint = ""  # the newest one when the job was started

    def run(self, launches: Launches, environ: Mapping[str, str], folder: Path) -> int:
        """Run the job to its end, and start it again if the launcher ends before its ranks have."""
        self._launches, self._environ, self._folder = launches, environ, folder
        remote = self._request.names_hosts or has_allocation(environ)
        with MilestoneListener(remote) as self._listener:
            while True:
                self._listener.renew()
                self._heard, self._first, self._lost_since = set(), None, None
                variables = {SUPERVISOR: self._listener.address, RESTARTS: str(self._restarts)}
                exports = {**self._request.exports, **dict.fromkeys(variables)}
                line = self._launcher.command(replace(self._request, exports=exports), environ)
                own = {**environ, **line.variables, **variables}
                code = launches.run(line.argv, own, self._is_lost)
                heard = self._heard = self._heard | self._listener.heard()
                if launches.asked is not None or code == EXIT_REQUEUE or ENDED in heard:
                    return code
                if FAILED in heard:
                    return code or EXIT_CRASH
                launches.end_orphans()
                end = self._prepare(code, heard)
                # Ctrl-C also ends the launchers that ask the hosts, which then seem lost.
                asked = launches.waiting()
                if asked is not None:
                    return 128 + asked
                if end is not None:
                    return end

    def _is_lost(self) -> bool:
        """Return whether a rank has ended for which the others would wait in init() forever."""
        self._heard |= self._listener.heard()
        if not self._heard or self._heard & {STARTED, ENDED, FAILED}:
            return False
        now = time.monotonic()
        self._first = self._first or now
        if LOST in self._heard:
            self._lost_since = self._lost_since or now
        missing = self._listener.began < (self._ranks() or 0) and now - self._first > _BEGIN_SECONDS
        lost = self._lost_since is not None and now - self._lost_since > _JOIN_SECONDS
        if not (missing or lost):
            return False
        _say("a rank has ended before all had started: the job ends")
        return True

    def _prepare(self, code: int, heard: set[str]) -> int | None:
        """Prepare the next start, and say so; or return the exit code of the job."""
        failure = code or EXIT_CRASH
        what = f"the job was ended before its end (mpirun's exit code {code})"
        self._trained |= STARTED in heard
        if self._trained and not self._listener.checkpoints:
            _say(f"{what}: it is not started again, because no checkpoint holds its state")
            return failure
        before = self._request.hosts
        hosts = answering(self._request, self._start, self._folder)
        lost = [host.name for host in before if host not in hosts]
        if code and not heard and (not lost or not hosts):  # mpirun says why nothing began
            return code
        if lost:
            what += f", {', '.join(lost)} no longer {'answer' if len(lost) > 1 else 'answers'}"
        if before:
            file = self._folder / f"hosts.{self._restarts}"
            self._request = on_hosts(self._request, hosts, file)
        ranks = self._ranks()
        if (before and not hosts) or (ranks is not None and ranks < self._least):
            left = f"{_counted(ranks if hosts or not before else 0)} could start again"
            _say(f"{what}: {left}, fewer than --min-np {self._least}")
            return EXIT_REQUEUE
        if self._gives_up():
            _say(f"{what}: it is not started again, after {self._in_vain} starts without progress")
            return failure
        self._restarts += 1
        where = ""  # no rank has told it
        if self._listener.checkpoints:
            where = f" from {self._checkpoint or 'the beginning'}"
        many = "" if ranks is None else f" with {_counted(ranks)}"
        _say(f"{what}: starting again{many}{where}")
        return None

    def _gives_up(self) -> bool:
        """Note the newest checkpoint; return whether starts have often led to no new one."""
        known = self._listener.checkpoints or [""]
        before = self._checkpoint if self._restarts else known[0]
        self._checkpoint = known[-1]
        self._in_vain = 0 if self._checkpoint != before else self._in_vain + 1
        return self._in_vain > _MOST_IN_VAIN

    def _ranks(self) -> int | None:
        request = self._request
        return request.ranks or _places(request, request.hosts) or None

    def _start(self, request: LaunchRequest) -> subprocess.Popen[bytes]:
        line = self._launcher.command(request, self._environ)
        environ = {**self._environ, **line.variables}
        # One that ends removes files of others in the same directory, which then wait forever.
        environ[SESSION] = tempfile.mkdtemp(dir=self._folder)
        return self._launches.start(line.argv, environ, quiet=True)


def _counted(ranks: int | None) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _say(text: str) -> None:
    print(f"hvdtrain: {text}", file=sys.stderr, flush=True)
