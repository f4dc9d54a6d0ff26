"""What must come of an operation, by formula from what the ranks contributed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from channel_operations import Value, data, long, rows
from channel_program import OTHER, Planned

from hvdtrain.core.collectives.gathers import rows_of_rank
from hvdtrain.types import ReduceOp


@dataclass(frozen=True)
class Contribution:
    """What the ranks did for one operation."""

    planned: Planned
    size: int
    ranks: frozenset[int]
    variant: int
    filled: Mapping[int, int]


def expected(given: Contribution, rank: int) -> Value:
    """Return the value that a rank gets."""
    return _FORMULAS[given.planned.kind](given, rank)


def _counts(given: Contribution) -> list[int]:
    return [count + (given.variant == OTHER) for count in given.planned.counts]


def _reduced(given: Contribution, part: int, count: int) -> npt.NDArray[np.float64]:
    planned = given.planned
    terms = np.zeros((given.size, count))
    for rank in given.ranks:
        terms[rank] = data(planned, rank, part, count).astype(np.float64) * planned.prescale
    if planned.op is ReduceOp.MAX:
        return terms.max(axis=0)
    total = terms.sum(axis=0)
    if planned.op is ReduceOp.SUM:
        return total
    average = total / given.size
    return np.trunc(average) if planned.dtype.is_integer else average


def _allreduce(given: Contribution, rank: int) -> Value:
    return [_reduced(given, *part).tolist() for part in enumerate(_counts(given))]


def _reducescatter(given: Contribution, rank: int) -> Value:
    parts = []
    for part, count in enumerate(_counts(given)):
        kept = [rows_of_rank(count, other, given.size) for other in range(given.size)]
        start = sum(kept[:rank])
        parts.append(_reduced(given, part, count)[start : start + kept[rank]].tolist())
    return parts


def _broadcast(given: Contribution, rank: int) -> Value:
    root = given.planned.number % given.size
    return [data(given.planned, root, 0, _counts(given)[0]).tolist()]


def _allgather(given: Contribution, rank: int) -> Value:
    planned, width = given.planned, _counts(given)[0]
    every = [rows(planned, other) for other in range(given.size)]
    parts = [data(planned, other, 0, own * width) for other, own in enumerate(every)]
    return [np.concatenate(parts).tolist(), every]


def _alltoall(given: Contribution, rank: int) -> Value:
    planned, width = given.planned, _counts(given)[0]
    parts, incoming = [], []
    for other in range(given.size):
        splits = [rows(planned, other, to) for to in range(given.size)]
        sent = data(planned, other, 0, sum(splits) * width)
        start = sum(splits[:rank])
        parts.append(sent[start * width : (start + splits[rank]) * width])
        incoming.append(splits[rank])
    return [np.concatenate(parts).tolist(), incoming]


def _barrier(given: Contribution, rank: int) -> Value:
    return []


def _split(given: Contribution, rank: int) -> Value:
    members = given.planned.members
    return [[members.index(rank), len(members)]] if rank in members else []


def _memory(given: Contribution, rank: int) -> Value:
    return [[64 * _counts(given)[0]]]


def _spread(given: Contribution, rank: int) -> Value:
    planned, size, parts = given.planned, given.size, 1 + (given.variant == OTHER)
    every = [[long(planned, other, size, part) for other in range(size)] for part in range(parts)]
    slices = [[a[64 * other :][:64] for other, a in enumerate(arrays)] for arrays in every]
    return [np.concatenate(of_ranks).tolist() for of_ranks in slices]


def _sum(given: Contribution, rank: int) -> Value:
    planned, size, parts = given.planned, given.size, 1 + (given.variant == OTHER)
    every = [[long(planned, other, size, part) for other in range(size)] for part in range(parts)]
    own = slice(64 * rank, 64 * rank + 64)
    for arrays in every:
        arrays[rank][own] = 2.0 * sum(array[own].astype(np.float64) for array in arrays)
    return [arrays[rank].tolist() for arrays in every]


def _gather(given: Contribution, rank: int) -> Value:
    planned = given.planned
    counts = planned.counts * (1 + (given.variant == OTHER))
    return [
        np.concatenate([data(planned, r, part, count) for r in range(given.size)]).tolist()
        for part, count in enumerate(counts)
    ]


def _put(given: Contribution, rank: int) -> Value:
    return [data(given.planned, rank, 0, given.planned.counts[0]).tolist()]


def _step(given: Contribution, rank: int) -> Value:
    planned = given.planned
    weights = {r: planned.weights[r] for r in given.ranks}
    weighted = any(weight is not None for weight in weights.values())
    share = {r: 1.0 if weight is None else weight for r, weight in weights.items()}
    divisor = sum(share.values()) if weighted else float(given.size)
    if planned.op is ReduceOp.SUM:
        share, divisor = dict.fromkeys(share, 1.0), 1.0
    parts = []
    for part, count in enumerate(planned.counts):
        total = np.zeros(count)
        for r in given.ranks:
            if part < given.filled[r]:
                total += share[r] * data(planned, r, part, count).astype(np.float64)
        parts.append((total / divisor).tolist())
    return [*parts, [planned.number * len(given.ranks), sum(r + 1 for r in given.ranks)]]


_FORMULAS: Mapping[str, Callable[[Contribution, int], Value]] = {
    "allreduce": _allreduce,
    "reducescatter": _reducescatter,
    "broadcast": _broadcast,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "barrier": _barrier,
    "split": _split,
    "memory": _memory,
    "spread": _spread,
    "sum slices": _sum,
    "gather": _gather,
    "put": _put,
    "step": _step,
}
