"""Has a real engine fail in a test, in the way and in the call that a test chooses.

In a worker, before anything imports `hvdtrain.core`:

    fault = EngineFault.parse("allreduce:5:1:raises")    # its 5th all-reduce, on rank 1
    install(fault)
    ...                                                  # init(), and whatever comes before
    fault.arm()                                          # count from here
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hvdtrain.buffer import Buffer
from hvdtrain.config import Config
from hvdtrain.engines import registry
from hvdtrain.engines.communicator import Communicator, EngineWorld

T = TypeVar("T")

# What a rank prints at its fault.
FAULT = "the fault"

_SLOW_SECONDS = 0.5


class EngineCallError(RuntimeError):
    """What a call raises that is to fail."""


def _raise() -> None:
    raise EngineCallError("the engine failed")


def _raise_errno(number: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    return fail


_KINDS: Mapping[str, Callable[[], None]] = {
    "raises": _raise,
    "EMFILE": _raise_errno(errno.EMFILE),
    "ENOMEM": _raise_errno(errno.ENOMEM),
    "slow": lambda: time.sleep(_SLOW_SECONDS),
}


@dataclass
class EngineFault:
    """Which call goes wrong, and how."""

    primitive: str
    call: int
    rank: int
    kind: str
    armed: bool = False

    @classmethod
    def parse(cls, text: str) -> EngineFault:
        """Return the fault that "primitive:call:rank:kind" names."""
        primitive, call, rank, kind = text.split(":")
        return cls(primitive, int(call), int(rank), kind)

    def arm(self) -> None:
        """Count calls from now on."""
        self.armed = True

    def meet(self, primitive: str, rank: int) -> None:
        """Do what is to happen before this call."""
        watch = threading.current_thread().name.startswith("hvdtrain-stall")
        if not self.armed or primitive != self.primitive or rank != self.rank or watch:
            return
        self.call -= 1
        if self.call == -1:
            print(FAULT, file=sys.stderr, flush=True)
            _KINDS[self.kind]()


def install(fault: EngineFault) -> None:
    """Have the world of this process meet a fault; call it before hvdtrain.core is imported."""
    assert "hvdtrain.core.context" not in sys.modules
    real = registry.open_world

    def open_world(name: str, config: Config, environ: Mapping[str, str]) -> EngineWorld:
        world = real(name, config, environ)
        faulty = _FaultyCommunicator(world.communicator, fault, world.communicator.rank)
        return replace(world, communicator=faulty)

    registry.open_world = open_world


def _meeting(name: str, primitive: str = "") -> Any:
    """Return a method that meets the fault, and calls the real one."""

    def call(self: _FaultyCommunicator, *arguments: Any, **named: Any) -> Any:
        self._fault.meet(primitive or name, self._world_rank)
        return getattr(self._inner, name)(*arguments, **named)

    return call


class _FaultyCommunicator(Communicator):
    """A communicator whose calls go to a real one, but for a fault; its children are alike."""

    def __init__(self, inner: Communicator, fault: EngineFault, world_rank: int) -> None:
        self.rank, self.size, self.capabilities = inner.rank, inner.size, inner.capabilities
        self._inner, self._fault, self._world_rank = inner, fault, world_rank

    start_max, allreduce, broadcast, allgather, alltoall = map(
        _meeting, ("start_max", "allreduce", "broadcast", "allgather", "alltoall")
    )
    reduce_scatter, barrier, empty, close = map(
        _meeting, ("reduce_scatter", "barrier", "empty", "close")
    )
    allreduce_from = _meeting("allreduce_from", "allreduce")

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        self._fault.meet("split", self._world_rank)
        child = self._inner.split(ranks)
        return child and _FaultyCommunicator(child, self._fault, self._world_rank)

    def put(self, source: Buffer, buffer: Buffer) -> None:
        self._inner.put(source, buffer)

    def abort(self, code: int) -> None:
        self._inner.abort(code)
