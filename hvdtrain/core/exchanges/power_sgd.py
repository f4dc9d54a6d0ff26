"""Gradients as products of two thin matrices: PowerSGD (Vogels, Karimireddy and Jaggi 2019)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any, cast

import numpy as np

from hvdtrain.arrays import Array, HostArray, copy, is_tensor, like, like_shape, namespace
from hvdtrain.collective import collective
from hvdtrain.core.exchanges.error_feedback import ErrorFeedback, sum_together
from hvdtrain.core.exchanges.parameter_state import ParameterState
from hvdtrain.core.gradients.exchange import (
    ExchangeState,
    FilledBucket,
    ParameterSlice,
    StepInfo,
    check_count,
    check_positive,
)
from hvdtrain.core.gradients.plan import ParameterSpec
from hvdtrain.engines.communicator import Communicator

# Elements of a block: three fit into a core's cache, and with ranks up to 8 OpenBLAS multiplies one
# in the calling thread. Its other threads would spin long after each product.
_BLOCK = 1 << 15


def times_transposed(thin: Array, matrix: Array) -> Array:
    """Return `thin` [rank, m] times the transposed contiguous matrix [n, m], [rank, n]."""
    made = like_shape(matrix, (thin.shape[0], matrix.shape[0]))
    for rows in _blocks(matrix):
        made[:, rows] = thin @ matrix[rows].T
    return made


def times(thin: Array, matrix: Array) -> Array:
    """Return `thin` [rank, n] times the contiguous matrix [n, m], [rank, m]."""
    made = like_shape(matrix, (thin.shape[0], matrix.shape[1]))
    made[...] = 0
    for rows in _blocks(matrix):
        made += thin[:, rows] @ matrix[rows]
    return made


def split(matrix: Array, left: Array, own: Array, error: Array, total: Array) -> None:
    """Write a matrix minus `left`^T `own` to `error`, and overwrite it with `left`^T `total`.

    Matrix and error are [n, m] and contiguous; `left` is [rank, n], `own` and `total` [rank, m].
    """
    xp = namespace(matrix)
    for rows in _blocks(matrix):
        columns, values = left[:, rows].T, matrix[rows]
        xp.subtract(values, columns @ own, out=error[rows])
        xp.matmul(columns, total, out=values)


def _blocks(matrix: Array) -> Iterator[slice]:
    """Yield the rows of blocks; torch divides its work itself."""
    count, length = matrix.shape
    rows = count if is_tensor(matrix) else max(1, _BLOCK // length)
    for first in range(0, count, rows):
        yield slice(first, min(first + rows, count))


# Added to divisors, so that zeros stay zeros; too small to change others in float32.
_EPSILON = 1e-30


def orthonormal(rows: Array) -> Array:
    """Return rows that span the same space, orthogonal to each other and of norm 1.

    Modified Gram-Schmidt, twice: in the first pass rows that depend on others become rounding
    errors, which the second pass makes orthogonal. Zeros stay zeros.
    """
    made: Any = copy(rows)
    xp = namespace(rows)
    made /= abs(made).max() + _EPSILON  # squares of small numbers would become zero
    for _ in range(2):
        for number in range(made.shape[0]):
            row, after = made[number], made[number + 1 :]
            row /= xp.sqrt((row * row).sum()) + _EPSILON
            after -= (after * row).sum(1)[:, None] * row
    return cast("Array", made)


_STEPS = "powersgd steps"


@dataclass(frozen=True)
class _Matrix:
    """A parameter that is compressed.

    Attributes:
        values: view of its elements, [n, m].
        error: view of its error, [n, m].
        right: orthonormal rows of the step, [rank, m].
    """

    name: str
    values: Array
    error: Array
    right: Array


class PowerSGDExchange(ErrorFeedback):
    """Send P = M Q and Q = M^T P of each gradient matrix M, and keep what P Q^T loses.

    Vectors and small matrices are summed uncompressed.

    Args:
        rank: number of columns of P and Q.
        min_rate: factor by which P and Q must be smaller than M.
        warm_start: whether Q begins with that of the step before, instead of random numbers.
        per_rank: compress what each rank sends, not only what each node sends.

    Raises:
        TypeError: `rank` is no whole number.
        ValueError: `rank` or `min_rate` is not positive.
    """

    whole_tensors = True

    def __init__(
        self,
        rank: int = 4,
        min_rate: float = 2.0,
        warm_start: bool = True,
        per_rank: bool = False,
    ) -> None:
        check_count("rank", rank)
        check_positive("min_rate", min_rate)
        options = f"rank={rank},min_rate={float(min_rate)!r},warm_start={warm_start}"
        super().__init__(f"powersgd:{options}", per_rank)
        self._rank, self._min_rate, self._warm_start = rank, min_rate, warm_start
        self._right = ParameterState("right")
        self._states.append(self._right)
        self._steps = 0
        self.exactness = (
            f"Between {self._sender}s each matrix is approximated with rank {rank}; what is lost "
            "is added to the next step's gradients."
        )

    @collective
    def combine(
        self,
        bucket: FilledBucket,
        elements: Array,
        start: int,
        network: Communicator,
        factor: float,
    ) -> Array:
        error = like_shape(elements, elements.shape)
        matrices, rest = [], []
        errors = bucket.pieces(error, start)
        for piece, lost in zip(bucket.pieces(elements, start), errors, strict=True):
            shape = matrix_shape(bucket.specs[piece.index])
            rank = min(self._rank, *shape)
            if sum(shape) * rank * self._min_rate < shape[0] * shape[1]:
                values, its_error = piece.elements.reshape(*shape), lost.elements.reshape(*shape)
                right = self._first_right(piece, values)
                matrices.append(_Matrix(piece.name, values, its_error, right))
            else:
                lost.elements[...] = 0
                rest.append(piece.elements)
        self._approximate(matrices, rest, network, factor)
        return error

    @collective
    def _approximate(
        self,
        matrices: Sequence[_Matrix],
        rest: Sequence[Array],
        network: Communicator,
        factor: float,
    ) -> None:
        """Overwrite matrices with `factor` times their approximate sums, `rest` with exact ones.

        Collective over the network. P and Q are stored transposed, because orthogonal columns are
        then contiguous.
        """
        left = [times_transposed(m.right, m.values) for m in matrices]
        flat = [p.reshape(-1) for p in left]
        sum_together([*flat, *rest], network)
        for vector in rest:
            vector *= factor
        bases = [orthonormal(p) for p in left]
        own = [times(base, m.values) for m, base in zip(matrices, bases, strict=True)]
        totals = [copy(right) for right in own]
        sum_together([total.reshape(-1) for total in totals], network)
        for m, base, right, total in zip(matrices, bases, own, totals, strict=True):
            split(m.values, base, right, m.error, total * factor)
            self._right.put(m.name, total)

    def _first_right(self, piece: ParameterSlice, values: Array) -> Array:
        """Return the orthonormal rows with which a step begins, [rank, m], equal on all ranks."""
        shape = (min(self._rank, *values.shape), values.shape[1])
        if not (self._warm_start and self._right.holds(piece.name)):
            return orthonormal(self._draw(piece.index, shape, values))
        right: Any = orthonormal(self._right.get(piece.name, like_shape(values, shape)))
        # After a gradient of a lower rank, such as zeros, what these rows miss would never be sent.
        zeros = (right == 0).all(1)
        if zeros.any():
            right[zeros] = self._draw(piece.index, shape, values)[zeros]
            right = orthonormal(right)
        return cast("Array", right)

    def _draw(self, index: int, shape: tuple[int, int], model: Array) -> Array:
        """Return random numbers, equal on all ranks, in the dtype and on the device of `model`."""
        drawn = np.random.default_rng([index, self._steps]).standard_normal(shape)
        return like(drawn, model)

    def end(self, info: StepInfo) -> None:
        super().end(info)
        self._steps += info.finite

    def state(self) -> ExchangeState:
        steps: Mapping[str, HostArray] = {_STEPS: np.array(self._steps)}
        return ExchangeState(steps, super().state().own)

    def load(self, state: ExchangeState) -> None:
        if _STEPS not in state.shared:
            raise ValueError(f"exchange {self.spec!r} was given no {_STEPS}")
        super().load(state)
        self._steps = int(state.shared[_STEPS])


def matrix_shape(spec: ParameterSpec) -> tuple[int, int]:
    """Return the sides of a parameter as a matrix: its first dimensions in memory and the others.

    They are divided where the sum of the sides is least; torch's hook has the first dimension and
    the others.
    """
    dimensions = sorted(zip(spec.strides, spec.shape, strict=True), reverse=True)
    firsts = accumulate((length for _, length in dimensions), mul, initial=1)
    sides = [(first, spec.count // first) for first in firsts if first]
    return min(sides, key=sum, default=(1, 0))
