"""Starting other ranks, for those that were lost or on new hosts, while the ranks continue."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hvdtrain.core.exits import write_message
from hvdtrain.engines.communicator import Newcomer
from hvdtrain.errors import HvdtrainError
from hvdtrain.world import discover

_PERIOD_SECONDS = 0.1
_DISCOVERY_SECONDS = 1.0
# How long MPI may take to start a process; its wait would not end with a process that ends at once.
_START_SECONDS = 60.0
# So many starts in a row may fail, each so long after the one before at most.
_TRIES, _ROW_SECONDS = 3, 120.0
# A rank that ends so soon after it has joined counts as one that could not be started.
_SETTLED_SECONDS = 30.0


@dataclass(eq=False)
class Recruit:
    """A process that was started to become a rank, and the seconds until it was ready, if it is."""

    newcomer: Newcomer
    host: str
    began: float = field(default_factory=time.perf_counter)
    ready_after: float | None = None


class Recruiter:
    """Starts processes in a thread, and knows which of them are ready to join (rank 0 only)."""

    def __init__(self, start: Callable[[str, bool], Newcomer], most: int, program: str) -> None:
        self._start_rank, self._most, self._program = start, most, program
        self._here = socket.gethostname()
        self._lock = threading.Lock()
        self._hosts: Sequence[str] = ()
        self._vacancies: Sequence[str] = ()
        self._known: set[str] = set()
        self._recruits: list[Recruit] = []
        self._between_worlds = False
        self._slots: dict[str, int] = {}
        self._discovered = 0.0
        self._tries, self._failed = _TRIES, 0.0
        self._taken: dict[str, float] = {}  # when the last rank of a host was taken in
        self._said = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="hvdtrain-recruits", daemon=True)

    def follow(self, hosts: Sequence[str], vacancies: Sequence[str]) -> None:
        """Go on for a world, the first one included."""
        with self._lock:
            for host in set(vacancies):
                taken = self._taken.get(host, -math.inf)
                again = vacancies.count(host) > self._vacancies.count(host)
                if again and time.monotonic() - taken < _SETTLED_SECONDS:
                    self._fail(f"a rank that had joined on {host} has ended")
            self._hosts, self._vacancies = hosts, vacancies
            self._between_worlds = False
            self._known.update(hosts)
        if not self._thread.is_alive() and not self._stopping.is_set():
            self._thread.start()

    @property
    def waits(self) -> bool:
        return any(recruit.ready_after is not None for recruit in self._recruits)

    def take(self) -> Recruit | None:
        """Return a process that is ready to join, and start none until `follow` is called."""
        with self._lock:
            self._between_worlds = True
            for recruit in self._recruits:
                if recruit.ready_after is not None:
                    self._recruits.remove(recruit)
                    self._taken[recruit.host] = time.monotonic()
                    return recruit
        return None

    def stop(self) -> None:
        """Start no more processes; those that have not joined end with this one."""
        self._stopping.set()

    def _work(self) -> None:
        while not self._stopping.wait(_PERIOD_SECONDS):
            with self._lock:
                for recruit in list(self._recruits):
                    try:
                        if recruit.newcomer.ready() and recruit.ready_after is None:
                            recruit.ready_after = time.perf_counter() - recruit.began
                    except HvdtrainError as error:
                        self._recruits.remove(recruit)
                        self._fail(str(error))
            if self._program and time.monotonic() - self._discovered > _DISCOVERY_SECONDS:
                self._discover()
            host = self._next_host()
            if host is not None:
                self._start(host)

    def _fail(self, text: str) -> None:
        now = time.monotonic()
        if self._tries and now - self._failed > _ROW_SECONDS:
            self._tries = _TRIES
        self._tries, self._failed = max(self._tries - 1, 0), now
        more = "" if self._tries else f"; after {_TRIES} in a row, no more are started"
        self._say(f"{text}{more}")

    def _say(self, text: str) -> None:
        write_message(f"[rank 0/{len(self._hosts)}]", text)

    def _discover(self) -> None:
        try:
            found, said = discover(self._program), ""
            self._slots = {self._name_known_for(host): slots for host, slots in found.items()}
        except HvdtrainError as error:
            said = str(error)
        if said and said != self._said:
            self._say(f"{said}; the hosts stay as they were")
        self._said, self._discovered = said, time.monotonic()

    def _name_known_for(self, host: str) -> str:
        """Return the name that a host calls itself, which may lack the domain."""
        short = host.partition(".")[0]
        if short.isdigit():  # of an address
            return host
        same = (known for known in self._known if known.partition(".")[0] == short)
        return next(same, host)

    def _next_host(self) -> str | None:
        """Return the host on which a rank is missing; None if there is none."""
        with self._lock:
            ranks = [*self._hosts, *(recruit.host for recruit in self._recruits)]
            if not self._tries or self._between_worlds or len(ranks) >= self._most:
                return None
            if self._program:
                missing = (host for host, n in self._slots.items() if ranks.count(host) < n)
                return next(missing, None)
            vacant = list(self._vacancies)
            for recruit in self._recruits:
                if recruit.host in vacant:
                    vacant.remove(recruit.host)
            return vacant[0] if vacant else None

    def _start(self, host: str) -> None:
        """Start a process on a host, in a thread, because MPI may wait for it forever."""
        # Where there are no other hosts, the launcher may know this one by another name.
        alone = {*self._known, host} == {self._here}
        done: list[Recruit | Exception] = []
        began = time.perf_counter()

        def start() -> None:
            try:
                newcomer = self._start_rank("" if alone else host, host in self._known)
                done.append(Recruit(newcomer, host, began))
            except Exception as error:
                done.append(error)

        thread = threading.Thread(target=start, name="hvdtrain-start", daemon=True)
        thread.start()
        thread.join(_START_SECONDS)
        result = done[0] if done else HvdtrainError(f"a rank on {host} has not started")
        if isinstance(result, Recruit):
            with self._lock:
                self._recruits.append(result)
        else:
            self._fail(str(result))
