"""Distributed optimizers: of a subclass that reduces gradients before it applies them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import keras

from hvdtrain.core.exchanges.saved import SavedExchange
from hvdtrain.core.gradients.exchange import Exchange
from hvdtrain.keras.backends.backend import current_backend
from hvdtrain.keras.backends.reduction import Reduction
from hvdtrain.keras.backends.refusals import refuse_weights
from hvdtrain.keras.tensors.types import Model, Tensor, Variable
from hvdtrain.types import ReduceOp

__all__ = [
    "DistributedMixin",
    "distribute",
    "distributed_optimizers",
    "training_state",
    "undistribute",
]


# Takes the step of a rank's own optimizer on gradients.
_Update: TypeAlias = Callable[[Sequence[Tensor | None]], None]


class DistributedMixin:
    """Base class of distributed optimizers, before the class of the optimizer.

    Attributes:
        hvdtrain_reduction: reduces the gradients.
        hvdtrain_class: class of the optimizer.
    """

    hvdtrain_reduction: Reduction
    hvdtrain_class: type
    learning_rate: Tensor | float
    variables: list[Variable]
    _trainable_variables: Sequence[Variable]

    def register_local_var(self, var: Variable) -> None:
        """Do not reduce the gradient of a variable (local)."""
        self.hvdtrain_reduction.add_local(var)

    def exchange_state(self) -> SavedExchange:
        """Return the state of the exchange and the number of steps, for a checkpoint (local).

        A checkpoint needs that of each rank, because `own` differs between ranks.

        Raises:
            RuntimeError: this rank has taken steps since the weights of all ranks were equal.
        """
        return self.hvdtrain_reduction.exchange_state(self)

    def load_exchange_state(self, state: SavedExchange) -> None:
        """Restore the state of the exchange, when model and optimizer are restored (local).

        Args:
            state: result of exchange_state() on the rank of the same number; on another number of
                ranks that of any rank, because what each rank kept for itself then begins anew, as
                the first rank says.

        Raises:
            ValueError: it is the state of another exchange.
        """
        self.hvdtrain_reduction.load_exchange_state(state)

    @property
    def exchange(self) -> Exchange | None:
        """The exchange; None for the default average or sum."""
        return self.hvdtrain_reduction.settings.exchange

    @property
    def exchanges_weights(self) -> bool:
        """Whether ranks step on their own gradients, and exchange weights afterwards (local).

        With post-local SGD that is so from its switch on.
        """
        return self.hvdtrain_reduction.exchanges_weights

    @property
    def sample_weight(self) -> Tensor | float | None:
        """Weight of this rank in the next steps: its number of samples; None if it is not known.

        It is for loops of your own; `fit` knows the samples of a batch itself. Gradients are
        averaged as sum_r(c_r g_r) / sum_r(c_r), where g_r is the gradient of rank r's mean loss;
        weights count with all samples since those of all ranks were equal. In a function that is
        traced, set it there to a tensor, such as keras.ops.shape(batch)[0].

        Raises:
            ValueError: the weight is negative or not finite, or `op` is not Average.
        """
        return self.hvdtrain_reduction.sample_weight

    @sample_weight.setter
    def sample_weight(self, weight: Tensor | float | None) -> None:
        if isinstance(weight, int | float) and not 0 <= weight < float("inf"):
            raise ValueError(f"sample_weight must be a finite number >= 0, got {weight}")
        if self.hvdtrain_reduction.settings.op is not ReduceOp.AVERAGE:
            raise ValueError("sample_weight needs op=Average")
        self.hvdtrain_reduction.sample_weight = weight

    @property
    def synchronized(self) -> bool:
        """Whether this rank has taken no step since the weights of all ranks were equal (local)."""
        weights = self.hvdtrain_reduction.weights
        return weights is None or weights.counter.synchronized

    def flush(self) -> None:
        """Exchange weights now if those of any rank have changed since all were equal (collective).

        Afterwards all ranks have the same bits. With an exchange of gradients it does nothing.
        """
        self.hvdtrain_reduction.flush(self)

    @property
    def iterations(self) -> Tensor:
        """Number of steps; during an update, of those since an exchange has reset the state.

        Keras's own learning rate schedules count all steps.
        """
        count: Tensor = super().iterations  # type: ignore[misc]
        weights = self.hvdtrain_reduction.weights
        forgotten = None if weights is None else weights.inner_state.forgotten
        if forgotten is None:
            return count
        since: Tensor = keras.ops.subtract(count, keras.ops.cast(forgotten, count.dtype))
        return since

    def build(self, variables: Sequence[Variable]) -> None:
        """Create the optimizer's own variables (local).

        Args:
            variables: variables that it is to update.
        """
        super().build(variables)  # type: ignore[misc]
        weights = self.hvdtrain_reduction.weights
        if weights is not None:
            weights.inner_state.note_built(self, is_new=True)

    def apply(
        self,
        grads: Sequence[Tensor | None],
        trainable_variables: Iterable[Variable] | None = None,
    ) -> None:
        """Reduce gradients, outside of any condition, and update the variables (collective).

        Args:
            grads: gradients with equal shapes and dtypes on all ranks.
            trainable_variables: the variable of each gradient; None for those of the last call.
        """
        given = None if trainable_variables is None else list(trainable_variables)
        variables = self._trainable_variables if given is None else given
        update: _Update = partial(super().apply, trainable_variables=given)  # type: ignore[misc]
        if len(grads) != len(variables):  # Keras raises the error
            update(grads)
        elif self.hvdtrain_reduction.weights is not None:
            self.hvdtrain_reduction.update_alone(update, grads, variables, self)
        else:
            update(self.hvdtrain_reduction(grads, variables))


class _LossScaleMixin(DistributedMixin):
    """Base class of distributed LossScaleOptimizers: whether gradients are finite is agreed on.

    They reduce gradients before they look for values that are not finite.
    """

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        trainable_variables: Sequence[Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Reduce gradients and return the updated variables (collective).

        Args:
            optimizer_variables: values of the optimizer's variables.
            grads: gradients with equal shapes and dtypes on all ranks.
            trainable_variables: the value of the variable of each gradient.

        Returns:
            The new values of `trainable_variables` and of `optimizer_variables`.
        """
        reduced = self.hvdtrain_reduction(grads, self._trainable_variables)
        updated: tuple[list[Tensor], list[Tensor]] = super().stateless_apply(  # type: ignore[misc]
            optimizer_variables, reduced, trainable_variables
        )
        return updated


def distribute(optimizer: keras.optimizers.Optimizer, reduction: Reduction) -> DistributedMixin:
    """Return an optimizer with the state of another that reduces gradients (local).

    Args:
        optimizer: optimizer that does not reduce gradients; both share their variables.
        reduction: reduces the gradients.

    Raises:
        ValueError: it reduces gradients already, is not an optimizer of Keras 3, or does not go
            with the exchange.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    if isinstance(optimizer, DistributedMixin) or isinstance(inner, DistributedMixin):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        got = type(optimizer)
        legacy = got.__module__.startswith("tf_keras.")
        instead = ": hvdtrain.tensorflow.DistributedOptimizer takes those of tf_keras"
        raise ValueError(
            "DistributedOptimizer takes an optimizer of Keras 3, got "
            + (f"{got.__module__}.{got.__name__}{instead}" if legacy else got.__name__)
        )
    refuse_weights(reduction.settings, optimizer)
    kind = type(optimizer)
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    mixin = _LossScaleMixin if scales else DistributedMixin
    # Keras finds the class by these names, so that a saved model loads without hvdtrain.
    name = keras.saving.get_registered_name(kind)
    public = issubclass(kind, getattr(keras.optimizers, kind.__name__, ()))
    module = "keras.optimizers" if public else kind.__module__
    # super() in `apply` of the mixin is the optimizer's class, which comes after the mixin.
    members = {
        "__module__": module,
        "apply": current_backend().do_not_compile(mixin.apply),
        "hvdtrain_class": kind,
    }
    if optimizer.built and reduction.weights is not None:
        reduction.weights.inner_state.note_built(optimizer, is_new=False)
    distributed: DistributedMixin = _with_state_of(optimizer, type(name, (mixin, kind), members))
    distributed.hvdtrain_reduction = reduction
    return distributed


def undistribute(optimizer: DistributedMixin) -> keras.optimizers.Optimizer:
    """Return the optimizer of a distributed one, with its state, without the reduction (local)."""
    plain = _with_state_of(optimizer, optimizer.hvdtrain_class)
    del plain.hvdtrain_reduction
    return plain


def _with_state_of(optimizer: keras.optimizers.Optimizer, kind: Any) -> Any:
    """Return an instance of a class that shares the state of an optimizer."""
    instance = kind.__new__(kind)
    instance.__dict__.update(optimizer.__dict__)
    return instance


def distributed_optimizers(model: Model) -> list[DistributedMixin]:
    """Return the distributed optimizers of a model: its own and those in its attributes (local)."""
    candidates = [getattr(model, "optimizer", None)]
    for value in vars(model).values():
        if isinstance(value, dict):
            candidates.extend(value.values())
        elif isinstance(value, list | tuple):
            candidates.extend(value)
        else:
            candidates.append(value)
    found = {id(each): each for each in candidates if isinstance(each, DistributedMixin)}
    return list(found.values())


def training_state(model: Model) -> list[Variable]:
    """Return the weights of a model and its optimizers' variables; builds its optimizer (local)."""
    own = model.optimizer
    if own is not None and not own.built:
        own.build(model.trainable_variables)
    optimizers = {
        id(each): each for each in (own, *distributed_optimizers(model)) if each is not None
    }
    return [*model.weights, *(v for each in optimizers.values() for v in each.variables)]
