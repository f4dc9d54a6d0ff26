"""Ranks that end while the others continue: MPI knows them, and process groups are made again."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist

from hvdtrain.collective import collective
from hvdtrain.engines.communicator import EngineWorld, Failures, Newcomer, poll_until
from hvdtrain.errors import PeerFailureError, RanksLostError, UnsupportedError

_Made = TypeVar("_Made")

# A connection that breaks may tell of a rank's end before MPI does.
_NOTICE_SECONDS = 10.0


class TorchFailures(Failures):
    """The ranks of a world of process groups that have ended."""

    def __init__(self, mpi: Failures, takes_newcomers: bool) -> None:
        self._mpi, self._takes_newcomers = mpi, takes_newcomers
        self._lock = threading.Lock()
        self._groups: WeakSet[Any] = WeakSet()
        self.revoked = False

    @collective
    def connect(self, make: Callable[[], _Made]) -> _Made:
        """Return the process group that a function makes, and have `revoke` end it."""
        group = self.unless_lost(make)
        with self._lock:
            self._groups.add(group)
        if self.revoked:
            _abort(group)
        return group

    @collective
    def unless_lost(self, make: Callable[[], _Made]) -> _Made:
        """Return the result of a function that may wait for other ranks."""
        made: Future[_Made] = Future()

        def work() -> None:
            try:
                made.set_result(make())
            except BaseException as error:
                made.set_exception(error)

        def done() -> bool:
            if not made.done():
                self.check()
            return made.done()

        threading.Thread(target=work, name="hvdtrain-connect", daemon=True).start()
        poll_until(done)
        return made.result()

    def watched(self, store: dist.Store) -> dist.Store:
        """Return a store whose waits end when a rank has ended."""
        return _WatchedStore(store, self.check)

    def lost(self) -> tuple[int, ...]:
        return self._mpi.lost()

    def check(self) -> None:
        self._mpi.check()

    def revoke(self) -> None:
        self._mpi.revoke()
        with self._lock:
            self.revoked = True
            groups = list(self._groups)
            self._groups.clear()
        for group in groups:
            _abort(group)

    def agree(self, value: bool) -> bool:
        return self._mpi.agree(value)

    def start_rank(self, host: str, known: bool) -> Newcomer:
        if not self._takes_newcomers:
            raise UnsupportedError("with engine nccl no rank can join: leave out --max-np")
        return self._mpi.start_rank(host, known)

    def reopen(self, newcomer: Newcomer | None = None) -> EngineWorld:
        self.revoke()
        return self._mpi.reopen(newcomer)

    def explained(self, error: BaseException) -> BaseException:
        """Return the RanksLostError that an error means, if a rank has ended."""
        if isinstance(error, RanksLostError) or not isinstance(error, PeerFailureError):
            return error
        deadline = time.monotonic() + _NOTICE_SECONDS

        def noticed() -> bool:
            self.check()
            return time.monotonic() > deadline

        try:
            poll_until(noticed)
        except RanksLostError as lost:
            return lost
        return error


class _WatchedStore(dist.Store):
    """What a gloo group that connects needs of a store.

    A thread that still waited in C++ when the process ends would crash it.
    """

    def __init__(self, store: dist.Store, check: Callable[[], None]) -> None:
        super().__init__()
        self._store, self._check_ranks = store, check

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        def there() -> bool:
            self._check_ranks()
            return bool(self._store.check(keys))

        poll_until(there)

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def has_extended_api(self) -> bool:
        return False


def _abort(group: Any) -> None:
    """Have all calls on a group fail, here and on the ranks that wait for this one."""
    gloo: Any = dist.ProcessGroupGloo
    if not isinstance(group, gloo):
        group.abort()
        return
    # Its abort() does nothing; a message that does not come in time closes all connections.
    for rank in set(range(group.size())) - {group.rank()}:
        with suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.uint8)], rank, 0).wait(timedelta(milliseconds=1))


# How long ranks wait for each other when they connect. Later waits are unlimited, because the core
# detects late ranks, and the network ranks that have ended.
_CONNECT = timedelta(seconds=300)
_FOREVER = timedelta(days=365)


@dataclass(frozen=True)
class Members:
    """The ranks that form a communicator, and how they find each other.

    `device` is gloo's, for all connections of this rank.
    """

    store: dist.Store
    rank: int
    size: int
    device: dist.ProcessGroupGloo.Device
    abort: Callable[[int], None] = os._exit
    leave: Callable[[], object] = bool
    failures: TorchFailures | None = None


@collective
def gloo_group(members: Members) -> dist.ProcessGroupGloo:
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._timeout = _CONNECT
    options._devices = [members.device]
    failures = members.failures
    # It must stay referenced from Python until the group is connected.
    store = members.store if failures is None else failures.watched(members.store)

    def make() -> dist.ProcessGroupGloo:
        prefixed = dist.PrefixStore("gloo", store)
        group: dist.ProcessGroupGloo = kind(prefixed, members.rank, members.size, options)
        group._set_default_timeout(_FOREVER)
        return group

    return make() if failures is None else failures.connect(make)


@collective
def nccl_group(members: Members, device: torch.device) -> dist.ProcessGroupNCCL:
    """Create the NCCL group of the members, and connect their GPUs."""
    if members.failures is not None:
        # By default a process ends when another one has ended.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _FOREVER
    store = dist.PrefixStore("nccl", members.store)

    def make() -> dist.ProcessGroupNCCL:
        group = dist.ProcessGroupNCCL(store, members.rank, members.size, options)
        # Otherwise NCCL would connect during the first operation.
        group.eager_connect_single_device(device)
        return group

    return make() if members.failures is None else members.failures.connect(make)
