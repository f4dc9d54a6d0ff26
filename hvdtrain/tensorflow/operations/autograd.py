"""What differentiable operations have in common: names, reductions, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.collective import collective
from hvdtrain.core.process_set import ProcessSet, require_process_set
from hvdtrain.tensorflow.graph.array_calls import automatic_name
from hvdtrain.types import ReduceOp


@dataclass(frozen=True)
class OperationName:
    """Name of an operation."""

    name: str | None = None
    ignore_name_scope: bool = False

    def or_automatic(self, kind: str, tensors: Sequence[tf.Tensor]) -> OperationName:
        """Return the name, or an automatic one if the user has given none."""
        if self.name is not None:
            return self
        return OperationName(automatic_name(kind, tensors), self.ignore_name_scope)

    def automatic(self) -> OperationName:
        """Return an automatic name, for the gradient of the operation."""
        return OperationName(None, self.ignore_name_scope)


@dataclass(frozen=True)
class Reduction:
    """A reduction: postscale * op over ranks of (prescale * tensor_r)."""

    op: ReduceOp
    process_set: ProcessSet
    prescale: float = 1.0
    postscale: float = 1.0

    def __post_init__(self) -> None:
        require_process_set(self.process_set)


@collective
def differentiable(
    forward: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
    backward: Callable[[Sequence[tf.Tensor], Sequence[tf.Tensor]], list[tf.Tensor]],
    tensors: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Run an operation with a gradient (collective if the operation is).

    TensorFlow prunes what a gradient does not depend on, so `backward` must need the same
    operations on every rank.
    """
    indices = [i for i, t in enumerate(tensors) if t.dtype.is_floating or t.dtype.is_complex]
    if not indices:
        return forward(tensors)

    def operation(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        def gradient(*upstream: tf.Tensor) -> Any:
            given = [tf.convert_to_tensor(upstream[i]) for i in indices]
            gradients = backward(given, [tensors[i] for i in indices])
            results = dict(zip(indices, gradients, strict=True))
            return [results.get(i) for i in range(len(inputs))] if len(inputs) > 1 else results[0]

        return forward(inputs), gradient

    outputs: list[tf.Tensor] = tf.custom_gradient(operation)(*tensors)
    return outputs
