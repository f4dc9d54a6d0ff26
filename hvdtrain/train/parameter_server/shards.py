"""The parts of the weights that servers hold, with the optimizer's state of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hvdtrain.core.sharding.segments import Segment
from hvdtrain.errors import UsageError

# Elements of a parameter, of a shard or of all shards, [n].
Flat = npt.NDArray[Any]
# The optimizer's state of a parameter or of a part of it by name: a flat array with one element for
# each of its elements, or any other value.
State: TypeAlias = dict[str, Any]

_TYPES = ("float32", "float64")


class ParameterRow:
    """Copies of a model's trained parameters and their gradients in host memory, [n] each.

    A framework reads the elements of a tensor, writes those of a parameter, and finds the gradient
    of each parameter, where None counts as 0.
    """

    def __init__(
        self,
        parameters: Sequence[Any],
        types: Sequence[str],
        read: Callable[[Any], Flat],
        write: Callable[[Any, Flat], None],
        gradients_of: Callable[[], Sequence[Any]],
    ) -> None:
        found = sorted(set(types))
        if len(found) != 1 or found[0] not in _TYPES:
            raise UsageError(
                f"a parameter server needs trained parameters of one type, {' or '.join(_TYPES)}, "
                f"got {' and '.join(found) or 'no parameter'}"
            )
        self.parameters, self.sizes = parameters, [prod(p.shape) for p in parameters]
        self._read, self._write, self._gradients_of = read, write, gradients_of
        self.weights: Flat = np.zeros(sum(self.sizes), found[0])
        self.gradients: Flat = np.zeros_like(self.weights)

    def read_weights(self) -> None:
        """Copy the parameters to `weights`."""
        self._copy(self.parameters, self.weights)

    def write_weights(self) -> None:
        """Copy `weights` to the parameters."""
        for parameter, part in zip(self.parameters, self.parts(self.weights), strict=True):
            self._write(parameter, part)

    def read_gradients(self) -> None:
        """Copy the gradients to `gradients`."""
        self._copy(self._gradients_of(), self.gradients)

    def _copy(self, tensors: Sequence[Any], flat: Flat) -> None:
        for tensor, part in zip(tensors, self.parts(flat), strict=True):
            part[:] = 0 if tensor is None else self._read(tensor)

    def parts(self, flat: Flat) -> list[Flat]:
        """Return the elements of each parameter."""
        return np.split(flat, np.cumsum(self.sizes)[:-1])


# Parameters are cut at multiples of this. Vectorized optimizers round the elements of a vector and
# those left over differently: these are then the same in the pieces as in the whole parameter.
_CUT_ELEMENTS = 64


def shard_bounds(sizes: Sequence[int], servers: int) -> list[tuple[int, int]]:
    """Return where each shard begins and ends in the row of all parameters."""
    elements = sum(sizes)
    cuts = [_cut_before(sizes, elements * server // servers) for server in range(servers)]
    return list(pairwise([*cuts, elements]))


def _cut_before(sizes: Sequence[int], position: int) -> int:
    """Return the last place at or before a position where a parameter may be cut."""
    start = max(start for start in accumulate([0, *sizes]) if start <= position)
    return start + (position - start) // _CUT_ELEMENTS * _CUT_ELEMENTS


def segments_in(sizes: Sequence[int], bounds: tuple[int, int]) -> Iterator[Segment]:
    """Yield the parts of parameters in a shard, in the order of the parameters."""
    first, end = bounds
    for parameter, (start, size) in enumerate(zip(accumulate([0, *sizes]), sizes, strict=False)):
        begin, stop = max(first, start), min(end, start + size)
        if begin < stop:
            yield Segment(parameter, begin - start, stop - begin, 0, begin - first)


def _is_flat(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 1


class Shard(ABC):
    """A server's part of the weights, [n], with an optimizer whose steps change them in place."""

    def __init__(self, segments: Sequence[Segment], weights: Flat) -> None:
        self.segments, self.weights = segments, weights

    @abstractmethod
    def step(self, gradient: Flat, number: int) -> None:
        """Step the optimizer."""

    @abstractmethod
    def states(self) -> Sequence[State]:
        """Return the optimizer's state of each segment."""

    @abstractmethod
    def load(self, states: Sequence[State]) -> None:
        """Take the present weights, and these states of the segments."""

    def parts(self, flat: Flat) -> list[Flat]:
        """Return the elements of each segment."""
        return [flat[segment.in_bucket] for segment in self.segments]

    def load_whole(self, states: Sequence[State]) -> None:
        """Take the present weights, and the segments' parts of the states of all parameters."""
        parts = [
            {
                name: value[segment.in_parameter] if _is_flat(value) else value
                for name, value in states[segment.parameter].items()
            }
            for segment in self.segments
        ]
        self.load(parts)


def outline_of(state: State) -> dict[str, Any]:
    """Return a state in which arrays are their types."""
    return {name: value.dtype if _is_flat(value) else value for name, value in state.items()}


def is_type(value: object) -> bool:
    """Return whether an outline has an array here."""
    return isinstance(value, np.dtype)


def refuse_optimizer(optimizer: object, framework: str, known: Sequence[type]) -> None:
    """Raise the error for an optimizer that cannot step on parts of parameters."""
    names = ", ".join(kind.__name__ for kind in known)
    raise UsageError(
        f"--strategy ps cannot use the recipe's optimizer {type(optimizer).__name__}: servers step "
        f"on parts of parameters, as {framework}'s {names} can"
    )
