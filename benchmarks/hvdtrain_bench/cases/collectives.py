"""Sums of tensors over all ranks: by size, many at once, and beside a busy main thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import torch

import hvdtrain.torch as hvd
from hvdtrain_bench.cases.checked import fill, most_calls, require_factor, sum_contender, sum_factor
from hvdtrain_bench.cases.peers import Library, Peer, PeerLibraries
from hvdtrain_bench.harness.ranks import Ranks
from hvdtrain_bench.harness.turns import Bench, Contender

_UNITS = ((1 << 20, "MiB"), (1 << 10, "KiB"))
_ITEM_BYTES = 4
_MANY, _MANY_BYTES = 100, 40 << 10
_BUSY_BYTES = 16 << 20
_BASE, _AGAIN = "engine mpi", "engine mpi again"


def size_text(nbytes: int) -> str:
    """Return a size as text, such as 4 MiB, which no other size has."""
    for unit, name in _UNITS:
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} bytes"


def measure(bench: Bench, peers: PeerLibraries) -> None:
    bench.result.skipped.update(peers.skipped)
    ranks, settings = bench.ranks, bench.settings
    memory = torch.empty(max(settings.sizes_bytes) // _ITEM_BYTES)
    ways = peers.all_of_them(max(settings.sizes_bytes))
    for name, about, base, contenders in [
        *_sizes(ranks, peers, ways, memory, settings.sizes_bytes),
        *_asynchronous(ranks, peers),
    ]:
        bench.say(name)
        seconds = bench.take_turns(contenders, settings.seconds_per_turn)
        bench.add(name, seconds, base, f"{base} again", **about)


_Planned = tuple[str, dict[str, Any], str, list[Contender]]


def _sizes(
    ranks: Ranks,
    peers: PeerLibraries,
    ways: Sequence[Peer],
    memory: torch.Tensor,
    sizes: Sequence[int],
) -> Iterator[_Planned]:
    for nbytes in sizes:
        count = nbytes // _ITEM_BYTES
        contenders = [
            sum_contender(ranks, peer, (memory if peer.memory is None else peer.memory)[:count])
            for peer in (peers.engine(_BASE), peers.engine(_AGAIN), *ways)
        ]
        contenders += _limits(ranks, memory[:count])
        yield size_text(nbytes), {"bytes": nbytes}, _BASE, contenders


def _limits(ranks: Ranks, source: torch.Tensor) -> list[Contender]:
    """Copy as many bytes, on one rank and on all of them at once, without communication."""
    target = torch.empty_like(source)
    factor = ranks.rank + 1

    def copy() -> None:
        target.copy_(source)

    def copy_on_root() -> None:
        if ranks.rank == 0:
            target.copy_(source)

    def check(_: int) -> None:
        require_factor(source, factor, f"{ranks.title} memcpy")

    def check_copy(calls: int) -> None:
        check(calls)
        require_factor(target, factor, f"{ranks.title} memcpy")

    def prepare() -> None:
        fill(source, factor)

    library, check_root = f"torch {torch.__version__}, copy_", check if ranks.rank else check_copy
    return [
        Contender("memcpy, all ranks at once", library, prepare, copy, check_copy),
        Contender("memcpy, one rank alone", library, prepare, copy_on_root, check_root),
    ]


def _asynchronous(ranks: Ranks, peers: PeerLibraries) -> Iterator[_Planned]:
    base, ours = "hvdtrain", Library(hvd, peers.library)
    ways = {base: ours, f"{base} again": ours}
    if peers.horovod is not None:
        ways["Horovod"] = peers.horovod
    tensors = [torch.empty(_MANY_BYTES // _ITEM_BYTES) for _ in range(_MANY)]
    order = Random(ranks.rank).sample(range(_MANY), _MANY)
    about = {"bytes": _MANY * _MANY_BYTES, "tensors": _MANY}
    name = f"{_MANY} x {size_text(_MANY_BYTES)}, each rank in an order of its own"
    yield name, about, base, [_submitted(ranks, *way, tensors, order) for way in ways.items()]

    tensors = [torch.empty(_BUSY_BYTES // _ITEM_BYTES)]
    about = {"bytes": _BUSY_BYTES}
    name = f"{size_text(_BUSY_BYTES)} beside a main thread that computes in Python"
    contenders = [
        _submitted(ranks, *way, tensors, [0], busy)
        for way in ways.items()
        for busy in (False, True)
        if not (busy and way[0] == f"{base} again")
    ]
    yield name, about, base, contenders


def _submitted(
    ranks: Ranks,
    name: str,
    way: Library,
    tensors: list[torch.Tensor],
    order: Sequence[int],
    busy: bool = False,
) -> Contender:
    """Sum tensors that are submitted in an order, and compute while they are not there."""
    its = way.hvd
    name = f"{name}, busy" if busy else name

    def prepare() -> None:
        for tensor in tensors:
            fill(tensor, ranks.rank + 1)

    def call() -> None:
        handles = [
            its.allreduce_async_(tensors[number], name=f"tensor {number}", op=its.Sum)
            for number in order
        ]
        for handle in handles:
            while busy and not its.poll(handle):
                sum(number * number for number in range(1000))  # some 50 us of Python
            its.synchronize(handle)

    def check(calls: int) -> None:
        for number, tensor in enumerate(tensors):
            what = f"{ranks.title} {name}, tensor {number}"
            require_factor(tensor, sum_factor(ranks.size, calls), what)

    return Contender(name, way.library, prepare, call, check, most_calls(ranks.size), turn=way.turn)
