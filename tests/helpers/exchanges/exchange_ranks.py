"""The ranks of an exchange's test: their values, made-up nodes, and a step of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from hashlib import blake2b
from itertools import product

import numpy as np
from exchange_formulas import Flat, OfRanks
from exchanging import SHAPES, Driven, together

import hvdtrain.torch as hvd
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import StepInfo
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import DType

COUNTS = [int(np.prod(shape)) for shape in SHAPES]
LIMITS = (1 << 20, 300)
# Up to four ranks, on one node, on nodes of their own, side by side and mixed, evenly and not.
NODES = [[0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1], [0, 1, 1, 1]]
TOLERANCE = {DType.FLOAT32: 2e-5, DType.FLOAT64: 1e-12}

# Of all results so far: every rank has the same.
BITS = blake2b()


def values(step: int, rank: int, dtype: DType) -> list[Flat]:
    """Return a rank's own, in the type in which buckets hold them."""
    generator = np.random.default_rng([step, rank])
    return [generator.standard_normal(count).astype(dtype.numpy) for count in COUNTS]


def of_ranks(step: int, dtype: DType) -> OfRanks:
    return [
        [each.astype(np.float64) for each in values(step, rank, dtype)]
        for rank in range(hvd.size())
    ]


def check(found: Sequence[Flat], expected: Sequence[Flat], dtype: DType) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE[dtype])
        BITS.update(one.tobytes())


def layouts() -> list[tuple[int, ...]]:
    """Return for each layout of the nodes the node of each rank of this world."""
    return list(dict.fromkeys(tuple(nodes[: hvd.size()]) for nodes in NODES))


@cache
def communicators_of(nodes: tuple[int, ...] | None) -> Communicators:
    """Return the communicators of some nodes; None for each rank on its own."""
    communicators: Communicators = together(
        Communicators.flat if nodes is None else partial(Communicators.hierarchical, nodes=nodes)
    )
    return communicators


def close(communicators: Communicators, _: Communicator) -> None:
    communicators.close()


def exchanged(
    driven: Driven, own: Sequence[Flat], info: StepInfo, nodes: tuple[int, ...] | None = None
) -> list[Flat]:
    communicators = communicators_of(nodes)
    result: list[Flat] = together(lambda _: driven.step(own, info, communicators))
    return result


def weighed(step: int, weights: Sequence[float] | None) -> StepInfo:
    """Return the info of a step in which the ranks count so much, or as much as one another."""
    if weights is None:
        return StepInfo(step, hvd.size())
    rank = hvd.rank()
    return StepInfo(step, hvd.size(), None, weights[rank], sum(weights), weighted=True)


def kinds() -> Iterator[tuple[DType, bool]]:
    """Return types of elements, and whether buckets are tensors."""
    return product((DType.FLOAT32, DType.FLOAT64), (False, True))
