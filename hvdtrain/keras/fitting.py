"""What `compile`, `fit` and `save` of Keras do in addition once hvdtrain is in use."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.exits import write_message
from hvdtrain.core.horovod_api import rank, size
from hvdtrain.core.process_set import global_process_set
from hvdtrain.errors import UnsupportedError
from hvdtrain.keras.backends.distributed import (
    DistributedMixin,
    distribute,
    distributed_optimizers,
    undistribute,
)
from hvdtrain.keras.backends.types import BackendTensor
from hvdtrain.keras.callbacks import BroadcastGlobalVariablesCallback, save_schedules
from hvdtrain.keras.synchronization import FirstBeforeSaving, FirstCallback, LastCallback


def compile_model(proceed: Callable[[], object], given: dict[str, Any]) -> object:
    """Compile a model, with what a DistributedOptimizer needs."""
    model, optimizer = given["self"], _reduce_before_scaling(given["optimizer"])
    if isinstance(optimizer, DistributedMixin):
        half = model.dtype_policy.name == "mixed_float16"
        if half and given["auto_scale_loss"] and not _scales(optimizer):
            inner = undistribute(optimizer)
            scaling = keras.optimizers.LossScaleOptimizer(inner, name="loss_scale_optimizer")
            optimizer = distribute(scaling, optimizer.hvdtrain_reduction)
        given["optimizer"] = optimizer
        if keras.backend.backend() == "tensorflow":
            if given["jit_compile"] and given["jit_compile"] != "auto":
                raise UnsupportedError(
                    "compile(jit_compile=True): XLA cannot compile a step that reduces gradients "
                    "on the TensorFlow backend, because reducing calls Python: leave out "
                    "jit_compile"
                )
            given["jit_compile"] = False
    return proceed()


def adjust_compiled(model: keras.Model) -> None:
    """Do for a compiled model what `compile_model` would have done.

    The first `model.compile(DistributedOptimizer(...))` before init() calls Keras's own `compile`:
    Python looks it up before it makes the optimizer, which hooks it.
    """
    given = getattr(model, "optimizer", None)
    optimizer = _reduce_before_scaling(given)
    if not isinstance(optimizer, DistributedMixin):
        return
    if optimizer is not given:
        model.optimizer = optimizer
    if keras.backend.backend() == "tensorflow" and model.jit_compile:
        model.jit_compile = False


def _reduce_before_scaling(optimizer: Any) -> Any:
    """Distribute a LossScaleOptimizer in place of the optimizer inside it."""
    if not (_scales(optimizer) and isinstance(optimizer.inner_optimizer, DistributedMixin)):
        return optimizer
    inner = optimizer.inner_optimizer
    optimizer.inner_optimizer = undistribute(inner)
    return distribute(optimizer, inner.hvdtrain_reduction)


def _scales(optimizer: object) -> bool:
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def warn_if_unwrapped(model: keras.Model, callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Warn once, on rank 0, that each rank trains a model of its own, if nothing can average it."""
    starts_equal = any(isinstance(c, BroadcastGlobalVariablesCallback) for c in callbacks)
    if starts_equal and not distributed_optimizers(model) and _runs_keras_only(model, callbacks):
        warn_once(
            "fit: BroadcastGlobalVariablesCallback, but the optimizer is not wrapped, so that each "
            "rank trains a model of its own and they drift apart: "
            "compile(hvd.DistributedOptimizer(optimizer), ...) with an optimizer such as "
            "keras.optimizers.Adam()"
        )


def warn_if_unsynchronized(model: keras.Model) -> None:
    """Warn once, on rank 0, of Keras layers that synchronize under tf.distribute only."""
    for layer in model._flatten_layers():
        if _is_from_keras(layer) and getattr(layer, "synchronized", False):
            warn_once(
                "fit: BatchNormalization(synchronized=True) uses each rank's own batch, because it "
                "synchronizes replicas of tf.distribute only: use "
                "hvdtrain.tensorflow.SyncBatchNormalization()"
            )


def _runs_keras_only(model: keras.Model, callbacks: Sequence[keras.callbacks.Callback]) -> bool:
    for callback in callbacks:
        known = _is_from_keras(callback) or type(callback).__module__.startswith("hvdtrain.")
        if not known or isinstance(callback, keras.callbacks.LambdaCallback):
            return False
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    own_step = type(model).train_step is keras.Model.train_step and "train_step" not in vars(model)
    frozen = model.built and not model.trainable_variables
    return own_step and not frozen and _is_from_keras(optimizer) and _is_from_keras(inner)


def _is_from_keras(instance: object) -> bool:
    """Return whether the class of an object is in Keras; a subclass elsewhere is not."""
    return type(instance).__module__.startswith("keras.src.")


# What `fit` takes as callbacks.
Callbacks: TypeAlias = keras.callbacks.CallbackList | Sequence[keras.callbacks.Callback] | None


@collective
def fit_model(proceed: Callable[[], object], given: dict[str, Any]) -> object:
    """Fit a model so that all ranks end each epoch together."""
    model = given["self"]
    adjust_compiled(model)
    optimizers = distributed_optimizers(model)
    if context.is_initialized() and size() > 1:
        warn_if_unwrapped(model, _as_list(given["callbacks"]))
        if optimizers:
            warn_if_unsynchronized(model)
    sets = [optimizer.hvdtrain_reduction.settings.process_set for optimizer in optimizers]
    if global_process_set in sets and size() > 1:
        given["callbacks"] = _with_synchronization(given["callbacks"])
    return proceed()


def _with_synchronization(callbacks: Callbacks) -> Callbacks:
    """Return the user's callbacks between those that keep ranks together."""
    own = _as_list(callbacks)
    first = FirstBeforeSaving if save_schedules(own) else FirstCallback
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        return [first(own), *own, LastCallback(own)]
    if not any(isinstance(callback, FirstCallback) for callback in own):
        callbacks.append(LastCallback(own))
        callbacks.callbacks.insert(0, first(own))
        callbacks.set_params(callbacks.params)
        callbacks.set_model(callbacks.model)
    return callbacks


def _as_list(callbacks: Callbacks) -> list[keras.callbacks.Callback]:
    """Return the callbacks that `fit` is given, in whatever structure."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return list(keras.tree.flatten(callbacks)) if callbacks is not None else []


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

    value: BackendTensor | int | None
    unit: Hashable
    of: object = None  # kept, so that no other object gets its id


_SUM = _Divisor(None, "nothing")
_UNKNOWN = _Divisor(None, "unknown")


class _BatchWeight:
    """Weighs a batch by what the losses of its step divide by."""

    def __init__(
        self, model: keras.Model, inputs: Any, targets: Any, first: dict[int, list[int]]
    ) -> None:
        self._name, self._first = model.name, first
        self._inputs, self._targets = inputs, targets
        self.divisors: list[_Divisor] = []

    def __call__(self) -> BackendTensor | int | None:
        """Return the weight; None if ranks count alike because their losses are sums."""
        known = [each for each in self.divisors if each is not _UNKNOWN]
        if not known or len(known) < len(self.divisors):
            warn_once(
                f"fit: a loss of model {self._name!r} is not averaged by one of Keras's losses, so "
                "what it divides by is not known, and batches are weighted by "
                f"{'those that are' if known else 'their rows'}: {_SAY_IT}"
            )
        elif not self._agree():
            warn_once(
                f"fit: losses of model {self._name!r} divide by numbers whose ratio may differ "
                "between batches, so that no weight of a batch is right for all of them, and the "
                f"first one's is taken: {_SAY_IT}",
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


def _rows(*structures: Any) -> BackendTensor | int | None:
    """Return the first dimension of the first array, a tensor while it is traced."""
    for leaf in keras.tree.flatten(structures):
        is_array = keras.ops.is_tensor(leaf) or isinstance(leaf, np.ndarray)
        if is_array and len(leaf.shape) > 0:
            rows: BackendTensor | int | None = keras.ops.shape(leaf)[0]
            if rows is not None:
                return rows
    return None


def make_weighing_step(proceed: Callable[[], object], given: dict[str, Any]) -> object:
    """Make a model's train function, whose steps weigh their batches."""
    model = given["self"]
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
        given["force"] = True
    return proceed()


def _weighing(model: keras.Model, original: Callable[..., object]) -> Callable[..., object]:
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
        write_message(topology.title, message)


def save_model(proceed: Callable[[], object], given: dict[str, Any]) -> object:
    """Save a model unless it is this rank's alone: others may not take part in an exchange."""
    optimizers = distributed_optimizers(given["self"])
    if not all(optimizer.synchronized for optimizer in optimizers):
        raise RuntimeError(
            f"{context.current().topology.title} save: the ranks' weights differ until their next "
            "exchange: call optimizer.flush() on all ranks before, or save at the end of an epoch; "
            "in fit give keras.callbacks.ModelCheckpoint(..., save_freq=batches) or "
            "BackupAndRestore, which hvdtrain knows on all ranks"
        )
    path = given["filepath"]
    in_pieces = given.get("zipped") is False or given.get("max_shard_size")
    one_file = str(path).endswith((".keras", ".h5")) and "://" not in str(path) and not in_pieces
    if not (one_file and given["overwrite"] and context.is_initialized() and size() > 1):
        return proceed()
    # Other ranks may save to this path now, as with a ModelCheckpoint on all of them.
    path = Path(path).resolve()  # what a link names is replaced, not the link
    if not path.parent.is_dir():
        return proceed()  # which says so
    own = path.with_name(f".unfinished-rank{rank()}-{path.name}")
    given["filepath"] = str(own)
    try:
        result = proceed()
        own.replace(path)
    finally:
        own.unlink(missing_ok=True)
    return result


def hook_models() -> None:
    """Hook methods of every Keras model. A second call does nothing."""
    _hook("compile", compile_model)
    _hook("fit", fit_model)
    _hook("make_train_function", make_weighing_step)
    hook_losses()
    _reduce_once()
    _hook("save", save_model)
    _hook("save_weights", save_model)


def _reduce_once() -> None:
    """Keep Keras 3.16 on torch from wrapping our models in DDP, and from summing metrics."""
    owner: Any = next(
        (kind for kind in keras.Model.__mro__ if "_initialize_ddp" in vars(kind)), None
    )
    if owner is None or hasattr(owner._initialize_ddp, "hvdtrain_hooked"):
        return
    wrap, metrics = owner._initialize_ddp, owner.get_metrics_result

    @functools.wraps(wrap)
    def initialize(model: keras.Model) -> None:
        if distributed_optimizers(model):
            object.__setattr__(model, "ddp_model", None)  # made before `compile`
        else:
            wrap(model)

    @functools.wraps(metrics)
    def results(model: keras.Model) -> Any:
        ours = distributed_optimizers(model)
        return super(owner, model).get_metrics_result() if ours else metrics(model)

    initialize.hvdtrain_hooked = True  # type: ignore[attr-defined]
    owner._initialize_ddp, owner.get_metrics_result = initialize, results


def _hook(
    method: str, replacement: Callable[[Callable[[], object], dict[str, Any]], object]
) -> None:
    owner: Any = next(kind for kind in keras.Model.__mro__ if method in vars(kind))
    original = getattr(owner, method)
    if hasattr(original, "hvdtrain_hooked"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> object:
        try:
            arguments = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{method}() {error}") from None
        arguments.apply_defaults()
        given = arguments.arguments
        return replacement(lambda: original(*arguments.args, **arguments.kwargs), given)

    hooked.hvdtrain_hooked = True  # type: ignore[attr-defined]
    # Not on keras.Model: a model whose class has another `compile` than this one counts as custom.
    setattr(owner, method, hooked)
