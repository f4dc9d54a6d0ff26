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

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.config import Config
from hvdtrain.engines import registry
from hvdtrain.engines.communicator import Communicator, EngineWorld
from hvdtrain.engines.features import Pending
from hvdtrain.types import ReduceOp

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


class _FaultyCommunicator(Communicator):
    """A communicator whose calls go to a real one, but for a fault; its children are alike."""

    def __init__(self, inner: Communicator, fault: EngineFault, world_rank: int) -> None:
        self.rank, self.size, self.capabilities = inner.rank, inner.size, inner.capabilities
        self._inner, self._fault, self._world_rank = inner, fault, world_rank

    def _meet(self, primitive: str) -> Communicator:
        self._fault.meet(primitive, self._world_rank)
        return self._inner

    def start_max(self, values: npt.NDArray[np.uint64]) -> Pending:
        return self._meet("start_max").start_max(values)

    def allreduce(
        self, buffer: Buffer, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        self._meet("allreduce").allreduce(buffer, op, prescale, postscale)

    def allreduce_from(self, source: Buffer, buffer: Buffer, *how: Any) -> None:
        self._meet("allreduce").allreduce_from(source, buffer, *how)

    def broadcast(self, buffer: Buffer, root_rank: int) -> None:
        self._meet("broadcast").broadcast(buffer, root_rank)

    def allgather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        self._meet("allgather").allgather(send, receive, counts)

    def alltoall(self, send: Buffer, receive: Buffer, *counts: Sequence[int]) -> None:
        self._meet("alltoall").alltoall(send, receive, *counts)

    def reduce_scatter(self, send: Buffer, receive: Buffer, *how: Any) -> None:
        self._meet("reduce_scatter").reduce_scatter(send, receive, *how)

    def barrier(self) -> None:
        self._meet("barrier").barrier()

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        child = self._meet("split").split(ranks)
        return child and _FaultyCommunicator(child, self._fault, self._world_rank)

    def empty(self, nbytes: int, device: str = "cpu") -> Elements:
        return self._meet("empty").empty(nbytes, device)

    def put(self, source: Buffer, buffer: Buffer) -> None:
        self._inner.put(source, buffer)

    def close(self) -> None:
        self._meet("close").close()

    def abort(self, code: int) -> None:
        self._inner.abort(code)
