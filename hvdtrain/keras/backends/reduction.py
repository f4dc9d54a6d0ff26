"""The reduction of an optimizer's gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from hvdtrain.core.arguments import group_indices
from hvdtrain.core.arrays.fused import reduce_fused
from hvdtrain.core.arrays.fused_plan import FusedSettings
from hvdtrain.core.arrays.memory import Array
from hvdtrain.keras.backends.choose import chosen
from hvdtrain.keras.backends.settings import GradientSettings
from hvdtrain.types import ReduceOp

__all__ = ["Reduction"]


class Reduction:
    """Reduces the gradients of an optimizer.

    Args:
        settings: how gradients are reduced.
        name: of the operation.
        factor: of the gradients, after they are reduced.
        scale_local: divide gradients of local variables by the number of ranks.

    Attributes:
        settings: as given.
        name: as given.
        uneven: ranks may have different numbers of batches, so that tf.IndexedSlices, which a rank
            without data cannot answer, are made dense.
        steps: how many times gradients were reduced.
    """

    def __init__(
        self, settings: GradientSettings, name: str, factor: float = 1.0, scale_local: bool = True
    ) -> None:
        self.settings, self.name = settings, name
        self._factor, self._scale_local = factor, scale_local
        self._local: dict[int, Any] = {}
        self._samples: Any = None
        self.uneven = False
        self.steps = 0

    @property
    def has_local(self) -> bool:
        """Whether gradients of some variables stay on their rank."""
        return bool(self._local)

    def keep_local(self, variable: Any) -> None:
        """Keep the gradient of a variable on its rank."""
        self._local[id(variable)] = variable  # kept, so that no other one gets its id

    @contextmanager
    def weighted(self, samples: Any) -> Iterator[None]:
        """Let gradients of this block, or trace, count by how many samples they are means of."""
        self._samples = samples
        try:
            yield
        finally:
            self._samples = None

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients of all ranks; None stays None (collective)."""
        results, process_set = list(gradients), self.settings.process_set
        size = process_set.size() if process_set.included() else 1
        present = [i for i, gradient in enumerate(results) if gradient is not None]
        shared = [i for i in present if id(variables[i]) not in self._local]
        if size != 1 and shared:
            average = self.settings.op is ReduceOp.AVERAGE
            reduced = chosen().reduce(
                [results[i] for i in shared],
                [variables[i] for i in shared],
                self,
                self._samples if average else None,
            )
            for i, gradient in zip(shared, reduced, strict=True):
                results[i] = gradient
        if self._scale_local and size != 1:
            for i in set(present) - set(shared):
                results[i] = keras.ops.divide(results[i], size)
        if self._factor != 1.0:
            for i in present:
                results[i] = keras.ops.multiply(results[i], self._factor)
        return results

    def reduce_arrays(
        self,
        arrays: Sequence[Array],
        variables: Sequence[Any],
        samples: float | None,
        name: str | None = None,
    ) -> list[Array]:
        """Return the gradients of all ranks, as soon as this rank's are there (collective).

        Args:
            arrays: this rank's gradients.
            variables: what they are of.
            samples: what this rank counts in the average; None for 1.
            name: of the operation, where the optimizer's own would be ambiguous.
        """
        settings = self.settings
        groups = group_indices(settings.groups, variables)
        fused = FusedSettings(
            settings.op, settings.process_set, settings.predivide, groups, settings.exchange
        )
        self.steps += 1
        return reduce_fused(arrays, name or self.name, fused, samples)
