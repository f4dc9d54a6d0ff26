"""What compressed exchanges must give, computed for all ranks on one process, block by block."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from exchange_formulas import Flat, OfRanks

from hvdtrain.core.gradients.communicators import slice_bounds
from hvdtrain.core.gradients.plan import Bucket, BucketPlan

# The parameters of SHAPES that are matrices, as they lie in memory.
MATRICES = {0: (7, 5), 3: (6, 4)}


def coded(x: Flat, bits: int) -> Flat:
    if bits == 1:
        below, above = x[x < 0], x[x >= 0]
        low = below.mean() if below.size else 0.0
        high = above.mean() if above.size else 0.0
        return np.where(x >= 0, high, low)
    outermost = 2 ** (bits - 1) - 1
    cell = 4 / 3 * np.sqrt(np.mean(x**2)) if bits == 2 else np.abs(x).max() / outermost
    return np.clip(np.round(x / cell), -outermost, outermost) * cell


class NBitFormula:
    """Codes of few bits between nodes, in two phases, with error feedback."""

    def __init__(self, bits: int, block: int, nodes: Sequence[int], plan: BucketPlan) -> None:
        self.ranks = [[r for r, n in enumerate(nodes) if n == node] for node in sorted(set(nodes))]
        self.size, self.owners = len(nodes), min(len(ranks) for ranks in self.ranks)
        self._bits, self._block, self._plan = bits, block, plan
        self.residual = [[np.zeros(spec.count) for spec in plan.specs] for _ in nodes]

    def step(self, gradients: OfRanks) -> list[Flat]:
        given = [
            [g + e for g, e in zip(gs, es, strict=True)]
            for gs, es in zip(gradients, self.residual, strict=True)
        ]
        result = [sum(each) for each in zip(*given, strict=True)]
        self.residual = [[0 * e for e in es] for es in self.residual]
        if len(self.ranks) > 1:
            for owner, blocks in self._slices():
                for number, (index, place) in enumerate(blocks):
                    stripe = _stripe(number, len(blocks), len(self.ranks))
                    own = [
                        np.sum([given[r][index][place] for r in ranks], axis=0)
                        for ranks in self.ranks
                    ]
                    sent = [x if n == stripe else coded(x, self._bits) for n, x in enumerate(own)]
                    total = np.sum(sent, axis=0)
                    result[index][place] = coded(total, self._bits)
                    for n, ranks in enumerate(self.ranks):
                        error = total - result[index][place] if n == stripe else own[n] - sent[n]
                        self.residual[ranks[owner]][index][place] = error
        return [each / self.size for each in result]

    def _slices(self) -> Iterator[tuple[int, list[tuple[int, slice]]]]:
        """Yield an owner, and parameter and place of the blocks of its slice, for each slice."""
        for bucket in self._plan.buckets:
            cuts = None if self._block else bucket.starts
            bounds = slice_bounds(bucket.count, self.owners, cuts)
            for owner, (low, high) in enumerate(pairwise(bounds)):
                yield owner, list(self._blocks(bucket, low, high))

    def _blocks(self, bucket: Bucket, low: int, high: int) -> Iterator[tuple[int, slice]]:
        length = self._block or 64
        for index, start in zip(bucket.parameters, bucket.starts, strict=True):
            first = max(low - start, 0)
            end = min(high - start, self._plan.specs[index].count)
            for at in range(first, end - length + 1, length):
                yield index, slice(at, at + length)


def _stripe(number: int, count: int, size: int) -> int:
    """Return which of `size` members sums a block, given its number among `count`."""
    bounds = slice_bounds(count, size)
    return next(member for member in range(size) if number < bounds[member + 1])


class TopKFormula:
    """The largest elements of matrices, with error feedback; each rank is a node."""

    def __init__(self, ratio: float, momentum: float, size: int, counts: Sequence[int]) -> None:
        self._ratio, self._momentum = ratio, momentum
        self.kept = [[np.zeros(count) for count in counts] for _ in range(size)]
        self._speed = [[np.zeros(count) for count in counts] for _ in range(size)]

    def step(self, gradients: OfRanks) -> list[Flat]:
        result = [np.zeros_like(each) for each in gradients[0]]
        for index, total in enumerate(result):
            for own, kept, speed in zip(gradients, self.kept, self._speed, strict=True):
                speed[index] = self._momentum * speed[index] + own[index]
                if index not in MATRICES or len(gradients) == 1:
                    total += speed[index]
                    continue
                kept[index] = kept[index] + speed[index]
                count = int(np.ceil(self._ratio * total.size))
                sent = np.argsort(-np.abs(kept[index]), kind="stable")[:count]
                total[sent] += kept[index][sent]
                kept[index][sent] = speed[index][sent] = 0
        return [each / len(gradients) for each in result]


class PowerSGDFormula:
    """Rank-r projections of matrices, with error feedback; each rank is a node."""

    def __init__(self, rank: int, warm_start: bool, size: int, counts: Sequence[int]) -> None:
        self._rank, self._warm_start, self._steps = rank, warm_start, 0
        self.kept = [[np.zeros(count) for count in counts] for _ in range(size)]
        self._right: dict[int, Flat] = {}

    def step(self, gradients: OfRanks) -> list[Flat]:
        result = [np.mean(each, axis=0) for each in zip(*gradients, strict=True)]
        if len(gradients) > 1:
            for index, shape in MATRICES.items():
                result[index] = self._approximate(index, shape, [own[index] for own in gradients])
        self._steps += 1
        return result

    def _approximate(self, index: int, shape: tuple[int, int], gradients: list[Flat]) -> Flat:
        given = [
            (own + kept[index]).reshape(shape)
            for own, kept in zip(gradients, self.kept, strict=True)
        ]
        average = np.mean(given, axis=0)
        seed = np.random.default_rng([index, self._steps])
        drawn = seed.standard_normal((self._rank, shape[1])).T
        right = self._right.get(index, drawn) if self._warm_start else drawn
        left, _ = np.linalg.qr(average @ np.linalg.qr(right)[0])
        self._right[index] = average.T @ left
        for own, kept in zip(given, self.kept, strict=True):
            kept[index] = (own - left @ (left.T @ own)).reshape(-1)
        result: Flat = (left @ (left.T @ average)).reshape(-1)
        return result
