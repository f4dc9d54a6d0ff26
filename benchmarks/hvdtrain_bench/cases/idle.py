"""The CPU usage of a rank that is idle, has joined, or waits for a late rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn

import hvdtrain.torch as hvd
from hvdtrain_bench.cases.peers import PeerLibraries
from hvdtrain_bench.cases.steps import with_hvdtrain
from hvdtrain_bench.harness.ranks import Ranks
from hvdtrain_bench.harness.turns import Bench

_PERCENT = 100.0


@dataclass(frozen=True)
class _State:
    """What ranks wait in until the last one, which is late, enters it; None if they only sleep."""

    name: str
    library: str
    wait: Callable[[], Any] | None
    turn: Callable[[], AbstractContextManager[None]] = nullcontext


def measure(bench: Bench, peers: PeerLibraries) -> None:
    bench.result.skipped.update(peers.skipped)
    values, seconds = {}, bench.settings.idle_seconds
    for state in _states(peers):
        bench.say(state.name)
        with state.turn():
            bench.note(state.name, state.library)
            values[state.name] = [_watch(bench.ranks, state, seconds)]
    bench.add(f"waiting {seconds:g} s", values, unit="percent", seconds=seconds)


def _watch(ranks: Ranks, state: _State, seconds: float) -> float:
    """Return the largest share of a core, in percent, of the ranks that are not late."""
    late = ranks.rank == ranks.size - 1
    ranks.rest()
    started, used = time.perf_counter(), time.process_time()
    if late or state.wait is None:
        time.sleep(seconds)
    if state.wait is not None:
        state.wait()
    share = (time.process_time() - used) / (time.perf_counter() - started)
    ranks.rest()
    counts = not late or state.wait is None
    return ranks.largest(_PERCENT * share if counts else 0.0)


def _states(peers: PeerLibraries) -> Iterator[_State]:
    module = nn.Linear(256, 256)
    forward, optimizer = with_hvdtrain(module)
    tensor = torch.ones(1 << 16)

    def step() -> None:
        forward(torch.ones(4, 256)).sum().backward()
        optimizer.step()

    def submit_and_wait() -> None:
        hvd.synchronize(hvd.allreduce_async(tensor, name="idle"))

    ours = peers.library
    yield _State("hvdtrain, idle", ours, None)
    yield _State("hvdtrain, joined", ours, hvd.join)
    yield _State("hvdtrain, late allreduce", ours, lambda: hvd.allreduce(tensor, name="idle"))
    yield _State("hvdtrain, late allreduce_async", ours, submit_and_wait)
    yield _State("hvdtrain, late training step", ours, step)
    if (horovod := peers.horovod) is not None:
        its, library, turn = horovod.hvd, horovod.library, horovod.turn
        yield _State("Horovod, idle", library, None, turn)
        yield _State("Horovod, joined", library, its.join, turn)
        yield _State(
            "Horovod, late allreduce", library, lambda: its.allreduce(tensor, name="idle"), turn
        )
    yield _State("gloo, late all_reduce", peers.gloo_library, lambda: dist.all_reduce(tensor))
    yield _State("mpi4py, late Barrier", peers.mpi_library, MPI.COMM_WORLD.Barrier)
