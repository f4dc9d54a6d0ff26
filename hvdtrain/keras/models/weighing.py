"""What a rank's batch weighs in a step of Keras: the number that its loss divides by.

The average of gradients over ranks is that of all rows if each rank counts with the divisor of its
loss. Keras tells no optimizer what that is: losses are told apart where all of them are reduced.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import keras
import numpy as np

from hvdtrain.core import context
from hvdtrain.core.process.exits import write_message
from hvdtrain.keras.backends.distributed import distributed_optimizers
from hvdtrain.keras.backends.types import Model, Tensor

_SAY_IT = (
    "set optimizer.sample_weight to a function of (x, y, sample_weight) that returns what the "
    "rank's loss of a batch divides by"
)
# A batch in which nothing counts has no gradient, but the regularizers of its rank have one. Its
# weight is therefore not 0: if all were 0, there would be no average.
_NOTHING = 1e-30


@dataclass(frozen=True)
class _Divisor:
    """What a loss divides by; those of equal units differ by a factor that no batch changes."""

    value: Tensor | int | None
    unit: Hashable
    of: object = None  # kept, so that no other object gets its id


_SUM = _Divisor(None, "nothing")
_UNKNOWN = _Divisor(None, "unknown")


class _BatchWeight:
    """Weighs a batch by what the losses of its step divide by."""

    def __init__(
        self, model: Model, inputs: Any, targets: Any, first: dict[int, list[int]]
    ) -> None:
        self._name, self._first = model.name, first
        self._inputs, self._targets = inputs, targets
        self.divisors: list[_Divisor] = []

    def __call__(self) -> Tensor | int | None:
        """Return the weight; None if ranks count alike because their losses are sums."""
        known = [each for each in self.divisors if each is not _UNKNOWN]
        if not known or len(known) < len(self.divisors):
            warn_once(
                f"a loss of model {self._name!r} is not averaged by one of Keras's losses, so what "
                "it divides by is not known, and batches are weighted by "
                f"{'those that are' if known else 'their rows'}: {_SAY_IT}"
            )
        elif not self._agree():
            warn_once(
                f"losses of model {self._name!r} divide by numbers whose ratio may differ between "
                "batches, so that no weight of a batch is right for all of them, and the first "
                f"one's is taken: {_SAY_IT}",
                every_rank=True,
            )
        return known[0].value if known else _rows(self._targets, self._inputs)

    def _agree(self) -> bool:
        if len({each.unit for each in self.divisors}) > 1:
            return False
        values: list[Any] = [each.value for each in self.divisors]
        if not all(isinstance(value, int) for value in values):
            return True
        first = self._first.setdefault(len(values), values)
        return all(a * first[0] == b * values[0] for a, b in zip(values, first, strict=True))


_steps: list[_BatchWeight] = []  # those that run, or are traced


def hook_losses() -> None:
    """Note what each of Keras's losses divides by. A second call does nothing."""
    module: Any = sys.modules[keras.losses.Loss.__module__]
    original = module.reduce_weighted_values
    if hasattr(original, "hvdtrain_hooked"):
        return

    @functools.wraps(original)
    def reduce_weighted_values(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        **options: Any,
    ) -> Any:
        if _steps:
            _steps[-1].divisors.append(_divisor(values, sample_weight, mask, reduction))
        return original(
            values, sample_weight=sample_weight, mask=mask, reduction=reduction, **options
        )

    reduce_weighted_values.hvdtrain_hooked = True  # type: ignore[attr-defined]
    module.reduce_weighted_values = reduce_weighted_values


def _divisor(values: Any, weights: Any, mask: Any, reduction: str | None) -> _Divisor:
    """Return what Keras's `reduce_weighted_values` divides by for these arguments."""
    shape = keras.ops.shape(values)
    if reduction == "sum":
        return _SUM
    if reduction in (None, "none") or not shape:
        return _UNKNOWN
    if reduction == "mean_with_sample_weight" and weights is not None:
        if mask is not None and len(mask.shape) != len(weights.shape):
            return _UNKNOWN
        return _counted(weights if mask is None else _number(weights) * _number(mask), weights)
    if mask is not None:
        of_mask = keras.ops.shape(mask)
        same = tuple(values.shape) == tuple(mask.shape) or reduction == "mean_with_sample_weight"
        factor = 1.0 if same else _number(prod(shape)) / _number(prod(of_mask))
        return _counted(_number(mask) * factor, mask)
    fixed = all(isinstance(size, int) for size in shape[1:])
    return _Divisor(prod(shape), "rows" if fixed else id(values), values)


def _counted(weights: Any, of: object) -> _Divisor:
    total = keras.ops.stop_gradient(keras.ops.sum(_number(weights)))
    return _Divisor(keras.ops.maximum(total, _NOTHING), id(of), of)


def _number(value: Any) -> Any:
    return keras.ops.cast(value, "float32")


def _rows(*structures: Any) -> Tensor | int | None:
    """Return the first dimension of the first array, a tensor while it is traced."""
    for leaf in keras.tree.flatten(structures):
        is_array = keras.ops.is_tensor(leaf) or isinstance(leaf, np.ndarray)
        if is_array and len(leaf.shape) > 0:
            rows: Tensor | int | None = keras.ops.shape(leaf)[0]
            if rows is not None:
                return rows
    return None


def make_weighing_step(
    original: Callable[..., object], arguments: inspect.BoundArguments
) -> object:
    """Make a model's train function, whose steps weigh their batches."""
    model: Model = arguments.arguments["self"]
    optimizers = distributed_optimizers(model)
    for optimizer in optimizers:
        told = optimizer.sample_weight
        if told is not None and not callable(told):
            raise ValueError(
                f"optimizer.sample_weight is {told}, but fit and train_on_batch weigh each batch: "
                f"set it to None, or {_SAY_IT}"
            )
    if optimizers and not hasattr(model.train_step, "hvdtrain_hooked"):
        model.train_step = _weighing(model, model.train_step)
        arguments.arguments["force"] = True
    return original(*arguments.args, **arguments.kwargs)


def _weighing(model: Model, original: Callable[..., object]) -> Callable[..., object]:
    first: dict[int, list[int]] = {}

    @functools.wraps(original)
    def train_step(*args: Any) -> object:
        try:
            batch = keras.utils.unpack_x_y_sample_weight(args[-1])
        except ValueError:  # a step of the user's own, for other batches
            batch = (args[-1], None, None)
        weight = _BatchWeight(model, batch[0], batch[1], first)
        with ExitStack() as stack:
            for optimizer in distributed_optimizers(model):
                told: Any = optimizer.sample_weight
                weigh = weight if told is None else partial(told, *batch)
                stack.enter_context(optimizer.hvdtrain_reduction.weighted(weigh))
            _steps.append(weight)
            stack.callback(_steps.pop)
            return original(*args)

    train_step.hvdtrain_hooked = True  # type: ignore[attr-defined]
    return train_step


@functools.cache
def warn_once(message: str, every_rank: bool = False) -> None:
    """Print a warning about weights, on rank 0 or wherever it is noticed."""
    topology = context.current().topology
    if topology.size > 1 and (every_rank or topology.rank == 0):
        write_message(topology.title, f"fit: {message}")
