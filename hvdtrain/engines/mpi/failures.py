"""Ranks that end while the others continue: Open MPI's user-level failure mitigation (ULFM)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import cast

import numpy as np
from mpi4py import MPI

from hvdtrain.collective import collective
from hvdtrain.engines.communicator import JOINED, EngineWorld, Failures, Newcomer, poll_until
from hvdtrain.engines.mpi.joining import (
    EndNotice,
    MpiNewcomer,
    agree,
    join_with,
    shrunk,
    start_rank,
)
from hvdtrain.errors import ExcludedError, PeerFailureError, RanksLostError, SystemLimitError
from hvdtrain.topology import format_ranks

_OF_OPEN_MPI = "/dev/shm/sm_segment."
_LOST = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
# How long the smaller side lets others be first.
_MINORITY_SECONDS = 0.3


def require_succession(key: str, before: MPI.Intracomm, left: MPI.Intracomm) -> None:
    """Check that no other ranks continue in the place of these (on each of them).

    Where connections are closed and nobody has ended, each side takes the other one for dead. The
    side that publishes this first through mpirun continues; ranks of a minority wait before they
    publish. Where nothing can be published, no side is excluded.
    """
    if left.size == before.size:
        return
    ranks = left.Get_group().Translate_ranks(None, before.Get_group())
    own = blake2b(" ".join(map(str, ranks)).encode(), digest_size=16).hexdigest()
    service = f"hvdtrain-{key}"
    if 2 * left.size < before.size:
        time.sleep(_MINORITY_SECONDS)
    with suppress(MPI.Exception):  # another one was first
        MPI.Publish_name(service, own)
    chosen = own
    with suppress(MPI.Exception):
        chosen = MPI.Lookup_name(service)
    if chosen != own:
        raise ExcludedError(
            f"[rank {before.rank}/{before.size}] connections to other ranks were closed, and they "
            f"continued without {format_ranks(ranks)}: this process ends"
        )


@collective
def open_among_survivors(
    comm: MPI.Intracomm, open_world: Callable[[MpiFailures], EngineWorld], name: str = ""
) -> EngineWorld:
    """Return a world of those ranks of a communicator that are left (collective over them)."""
    while True:
        left = shrunk(comm)
        if name:
            require_succession(name, comm, left)
            name += "+"  # each attempt has a name of its own
        failures = MpiFailures(left, open_world)
        world, reason = None, None
        try:
            world = open_world(failures)
            failures.notice = EndNotice.of(failures.comm)
        except SystemLimitError:  # on every rank
            raise
        except Exception as error:  # what a call that was broken off returns may be anything
            reason = error
            failures.revoke()  # the others may wait for this rank
        if failures.agree(world is not None):
            assert world is not None
            # All ranks have met, so that each has mapped the segments of its host. Those without
            # names are freed with the last rank that uses them, however ranks end.
            for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
                path = line.partition("/")
                if (path[1] + path[2]).startswith(_OF_OPEN_MPI):
                    Path(path[1] + path[2].removesuffix(" (deleted)")).unlink(missing_ok=True)
            before = failures.comm.Get_group().Translate_ranks(None, comm.Get_group())
            return replace(world, before=tuple(before))
        failures.revoke()
        if world is not None:
            world.communicator.close()
        # The ranks that have ended are known to all that have agreed.
        if reason is not None and not isinstance(failures.explained(reason), RanksLostError):
            raise reason


class MpiFailures(Failures):
    """The ranks of a world that have ended."""

    # How often a rank that waits in shared memory looks for failures.
    check_seconds = 0.1

    def __init__(
        self, comm: MPI.Intracomm, open_world: Callable[[MpiFailures], EngineWorld]
    ) -> None:
        self.comm, self._open_world = comm, open_world
        self.name = ""
        self.notice: EndNotice | None = None
        self._lock = threading.Lock()
        self._derived: list[MPI.Comm] = []
        self._unfinished: object = None

    @collective
    def split(self, parent: MPI.Intracomm, color: int, key: int) -> MPI.Intracomm:
        """Split a communicator, on all of its ranks or on none.

        Ranks that revoke all that they have then reach every rank that waits for them.
        """
        made: MPI.Intracomm | None = None
        try:
            made = cast("MPI.Intracomm", parent.Split(color, key))
        except MPI.Exception as error:
            if not isinstance(self.explained(error), RanksLostError):
                raise
            parent.Revoke()  # others may wait for this rank within MPI_Comm_split
        if not agree(parent, made is not None):
            raise self._error()
        assert made is not None
        return self._added(made)

    @collective
    def duplicate(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        """Return another communicator of the same ranks; see `split`."""
        # If a rank ends within MPI_Comm_dup, others crash or wait forever.
        made = shrunk(comm)
        if made.size < comm.size:
            raise self._error()
        return self._added(made)

    def _added(self, made: MPI.Intracomm) -> MPI.Intracomm:
        if made != MPI.COMM_NULL:
            with self._lock:
                self._derived.append(made)
        return made

    def free(self, comm: MPI.Comm) -> None:
        """Free a communicator unless it was revoked: its late messages would reach another one."""
        with self._lock:
            if comm.Is_revoked():
                return
            self._derived = [other for other in self._derived if other != comm]
        comm.Free()  # without the lock, because it may wait for other ranks

    def lost(self) -> tuple[int, ...]:
        failed = self.comm.Get_failed()
        return tuple(sorted(failed.Translate_ranks(None, self.comm.Get_group())))

    def check(self) -> None:
        if self._notices():
            raise self._error()

    def revoke(self) -> None:
        with self._lock:
            for comm in (self.comm, *self._derived):
                if not comm.Is_revoked():
                    comm.Revoke()

    @collective
    def agree(self, value: bool) -> bool:
        return agree(self.comm, value)

    @collective
    def confirm(self, comm: MPI.Comm) -> None:
        """Check that all ranks of a communicator call this, and none has ended."""
        flag = np.array([True], np.int32)
        request = comm.Iagree(flag)
        checked = time.monotonic()

        def agreed() -> bool:
            nonlocal checked
            if request.Test():
                return True
            if time.monotonic() - checked > self.check_seconds:
                checked = time.monotonic()
                self._unfinished = request, flag  # MPI may still write into it
                self.check()
            return False

        poll_until(agreed)

    def start_rank(self, host: str, known: bool) -> MpiNewcomer:
        return start_rank(host, known)

    @collective
    def reopen(self, newcomer: Newcomer | None = None) -> EngineWorld:
        assert newcomer is None or isinstance(newcomer, MpiNewcomer)
        self.revoke()
        left = shrunk(self.comm)
        require_succession(self.name, self.comm, left)
        whole = join_with(left, newcomer)
        world = open_among_survivors(whole, self._open_world, f"{self.name}+")
        assert world.before is not None
        numbers = whole.Get_group().Translate_ranks(None, self.comm.Get_group())
        return replace(world, before=tuple(max(numbers[rank], JOINED) for rank in world.before))

    def explained(self, error: BaseException) -> BaseException:
        """Return the RanksLostError that an error of MPI or of a wait means, if it means one."""
        if isinstance(error, RanksLostError) or not isinstance(error, Exception):
            return error
        tells = isinstance(error, PeerFailureError) or (
            isinstance(error, MPI.Exception) and error.Get_error_class() in _LOST
        )
        # Ranks that have ended also cause other errors, as of broken connections.
        return self._error() if tells or self._notices() else error

    def _notices(self) -> bool:
        if self.notice is not None:
            self.notice.heed()
        with suppress(MPI.Exception):
            self.comm.Iprobe()  # MPI learns of ends, and of other ranks' revoke(), within calls
        with self._lock:  # no other thread frees one meanwhile
            revoked = any(comm.Is_revoked() for comm in (self.comm, *self._derived))
        return revoked or bool(self.lost())

    def _error(self) -> RanksLostError:
        ranks = self.lost()
        who = f"{format_ranks(ranks)} ended" if ranks else "a rank has ended"
        title = f"[rank {self.comm.rank}/{self.comm.size}]"
        return RanksLostError(f"{title} {who}: look for its own message", ranks)
