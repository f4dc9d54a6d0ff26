"""Runs a Keras program, on one process for all ranks' rows and on each rank for its own.

A program is plain data: what is left out of it is the simplest, so that any part can be left out.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

os.environ["JAX_ENABLE_X64"] = "1"
import keras
import numpy as np
from program_values import compare, digest, failure

import hvdtrain.keras as hvd
from hvdtrain.keras.callbacks import warmup_multiplier

Spec = dict[str, Any]
WIDTH, TIMES, TOKENS, CLASSES, RATE = 4, 3, 5, 3, 0.01
# eps is far above what rounding leaves of a gradient that is 0.
OPTIMIZERS: dict[str, tuple[Any, Spec]] = {
    "sgd": (keras.optimizers.SGD, {}),
    "momentum": (keras.optimizers.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (keras.optimizers.Adam, {"epsilon": 0.01}),
    "adamw": (keras.optimizers.AdamW, {"epsilon": 0.01}),
    "rmsprop": (keras.optimizers.RMSprop, {"epsilon": 0.01}),
    "adagrad": (keras.optimizers.Adagrad, {"epsilon": 0.01}),
}
REDUCTIONS = {"mean": "sum_over_batch_size"}


class Batches(keras.utils.PyDataset):
    """The batches of an epoch, each of the rows of some ranks."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.training = training

    def __len__(self) -> int:
        return self.training.count

    def __getitem__(self, number: int) -> Any:
        return self.training.batch(number)


class Training:
    def __init__(
        self, program: Spec, parts: list[int], members: list[int], process_set: Any = None
    ) -> None:
        self.program, self.parts, self.members = program, parts, members
        self.together, self.set = process_set is not None, process_set
        self.get = program.get
        self.fit = self.get("loop", "fit") == "fit"
        self.callbacks = self.get("callbacks", []) if self.fit else []
        self.kinds = self.get("losses") or ["mse"]
        self.reduction = REDUCTIONS.get(self.get("reduction", "mean"), self.get("reduction"))
        self.steps = [rows or [2] for rows in self.get("steps") or [[2]]]
        self.count = max(self._length(rank) for rank in parts)
        keras.backend.clear_session()
        kind = "float32" if self.get("f32") else "float64"
        keras.config.set_floatx(kind)
        keras.config.set_dtype_policy(kind)
        keras.utils.set_random_seed(hvd.rank() if self.together else 0)
        self.model = self._model()
        self.optimizer = self._optimizer()
        # What the loss of one process lacks of what the gradients of all ranks are.
        n, self.factor = len(members), 1.0
        if not self.together:
            if self.get("reduction") == "sum":
                self.factor = 1.0 if self.get("op") == "sum" else 1 / n
            elif self.get("op") == "sum":
                self.factor = float(n)
            if not self.get("average_passes"):
                self.factor *= self.get("passes", 1)
        elif "broadcast" not in self.callbacks:
            hvd.broadcast_variables(self.model.weights, 0)

    def _length(self, rank: int) -> int:
        short = self.get("short") or [0]
        return max(1, len(self.steps) - short[rank % len(short)])

    def _model(self) -> Any:
        inputs = [keras.Input([TIMES, WIDTH])]
        h = keras.layers.Masking()(inputs[0]) if self.get("mask") else inputs[0]
        dense: Any = None
        for spec in self.get("layers", []):
            kind, of = spec.get("kind", "dense"), h
            layer: Any = keras.layers.Dense(
                WIDTH, "tanh", kernel_regularizer=self.get("l2") and "l2"
            )
            if kind == "shared" and dense is not None:
                layer = dense
            elif kind == "embedding":
                if len(inputs) == 1:
                    inputs.append(keras.Input([TIMES], dtype="int32"))
                layer, of = keras.layers.Embedding(TOKENS, WIDTH), inputs[1]
            elif kind == "norm":
                layer = keras.layers.BatchNormalization()
            elif kind == "dense":
                dense = layer
            layer.trainable = kind not in ("norm", "frozen")
            h = keras.layers.Add()([h, layer(of)])
        if self.get("pool"):
            h = keras.layers.GlobalAveragePooling1D()(h)
        sizes = [CLASSES if kind == "crossentropy" else 2 for kind in self.kinds]
        return keras.Model(inputs, [keras.layers.Dense(size)(h) for size in sizes])

    def _optimizer(self) -> Any:
        kind, settings = OPTIMIZERS[self.get("optimizer", "sgd")]
        settings = settings | self.get("with", {})
        passes = self.get("passes", 1)
        if passes > 1 and not self.together:
            settings["gradient_accumulation_steps"] = passes
        schedule = keras.optimizers.schedules.ExponentialDecay(RATE, 1, 0.5)
        optimizer = kind(schedule if self.get("schedule") else RATE, **settings)
        if self.get("scale"):
            optimizer = keras.optimizers.LossScaleOptimizer(
                optimizer, initial_scale=8.0, dynamic_growth_steps=2
            )
        if not self.together:
            return optimizer
        return hvd.DistributedOptimizer(
            optimizer,
            op=hvd.Sum if self.get("op") == "sum" else hvd.Average,
            backward_passes_per_step=passes,
            average_aggregated_gradients=self.get("average_passes", False),
            process_set=self.set,
            **self.get("options", {}),
        )

    def batch(self, number: int) -> tuple[Any, ...]:
        ranks = [r for r in self.parts if number < self._length(r)]
        rows = [self._rows(number, rank) for rank in ranks]
        x, tokens, classes, values, weights = (
            np.concatenate([part[i] for part in rows]) for i in range(5)
        )
        targets = tuple(classes if kind == "crossentropy" else values for kind in self.kinds)
        several = len(targets) > 1
        if self.get("weights") == "class":
            weights = np.array([1.0, 2.0, 0.5])[classes]  # as Keras takes class_weight
        given = (weights,) * len(targets) if several else weights
        inputs = (x, tokens) if len(self.model.inputs) > 1 else x
        batch = inputs, targets if several else targets[0], given
        return batch if self.get("weights") else batch[:2]

    def _rows(self, number: int, rank: int) -> list[Any]:
        counts = self.steps[number]
        count = counts[rank % len(counts)]
        random = np.random.default_rng([number, rank])
        x = random.normal(size=(count, TIMES, WIDTH))
        pool = self.get("pool")
        if self.get("mask"):
            x[random.random((count, TIMES)) < 0.3] = 0
            if pool:
                x[:, 0] = 1
        tokens = random.integers(0, TOKENS, (count, TIMES))
        classes = random.integers(0, CLASSES, (count, *[TIMES][: not pool]))
        values = random.normal(size=(*classes.shape, 2))
        weights = random.choice([0, 0.5, 1, 2], classes.shape)
        if not self.fit:  # so that all ranks have a divisor
            weights[0] = 1
        kind = keras.config.floatx()
        return [x.astype(kind), tokens, classes, values.astype(kind), weights.astype(kind)]

    def losses(self) -> list[Any]:
        made: Any = {
            "mse": lambda: keras.losses.MeanSquaredError(self.reduction),
            "crossentropy": lambda: keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction=self.reduction
            ),
            "unused": lambda: None,
        }
        return [made[kind]() for kind in self.kinds]

    def train(self) -> dict[str, Any]:
        logs: Spec = {}
        if self.get("loop") == "own":
            self._own()
        else:
            several = len(self.kinds) > 1
            self.model.compile(
                self.optimizer,
                self.losses() if several else self.losses()[0],
                loss_weights=[self.factor] * len(self.kinds) if several else self.factor,
                run_eagerly=self.get("eager", False)
                or (not self.together and keras.backend.backend() == "tensorflow"),
                steps_per_execution=self.get("executions", 1),
                jit_compile=self.get("jit", "auto") if self.together else "auto",
            )
            if self.fit:
                for _ in range(self.get("fits", 1)):
                    logs = self._fit()
            for number in range(0 if self.fit else self.count):
                self.model.train_on_batch(*self._given(number))
        named = [*self.model.weights, *self.optimizer.variables]
        return logs | {f"{i} {v.name}": _array(v) for i, v in enumerate(named)}

    def _given(self, number: int) -> list[Any]:
        batch = self.batch(number)
        if self.get("weights") != "class":
            return list(batch)
        return [*batch[:2], None, {0: 1.0, 1: 2.0, 2: 0.5}]

    def _fit(self) -> Spec:
        size, rate = hvd.size() if self.together else self.program["size"], RATE
        callbacks: list[Any] = []
        if self.together:
            if "broadcast" in self.callbacks:
                callbacks.append(hvd.callbacks.BroadcastGlobalVariablesCallback(0))
            if "metrics" in self.callbacks:
                callbacks.append(hvd.callbacks.MetricAverageCallback())
            if "warmup" in self.callbacks:
                warm = hvd.callbacks.LearningRateWarmupCallback(rate, 1, momentum_correction=False)
                callbacks.append(warm)
        elif "warmup" in self.callbacks:
            inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
            epochs: list[int] = []

            def set_rate(number: int, logs: Any = None) -> None:
                if len(epochs) == 1:
                    if hasattr(self.model, "jax_state_sync"):  # else Keras loses what is set
                        self.model.jax_state_sync()
                    epoch = number / self.count
                    inner.learning_rate = rate * warmup_multiplier(epoch, 1, self.count, size)

            callbacks.append(
                keras.callbacks.LambdaCallback(
                    on_epoch_begin=lambda epoch, logs: epochs.append(epoch),
                    on_train_batch_begin=set_rate,
                )
            )
        how: Spec = {"epochs": self.get("epochs", 1), "shuffle": False, "callbacks": callbacks}
        data: Any = Batches(self)
        if self.together and self.get("data") == "generator":
            data = self._generated()
        elif self.together and self.get("data") == "arrays":
            parts = [self.batch(number) for number in range(self.count)]
            how["batch_size"] = len(keras.tree.flatten(parts[0])[0])
            whole = keras.tree.map_structure(lambda *each: np.concatenate(each), *parts)
            data, how["y"], how["sample_weight"] = (*whole, None)[:3]
        if self.get("validate") and (0 in self.parts or "metrics" in self.callbacks):
            how["validation_data"] = self.batch(0)[:2]  # else of rank 0 alone
        history = self.model.fit(data, verbose=0, **how).history
        exact = "metrics" in self.callbacks and self.reduction == "sum_over_batch_size"
        exact = exact and self.get("op") != "sum" and self.get("passes", 1) == 1
        if not exact or self.get("mask") or len(self.members) < self.program["size"]:
            return {}
        return {"loss": np.array(history["loss"])}

    def _generated(self) -> Iterator[Any]:
        for number in range(self.count):
            yield self.batch(number)

    def _own(self) -> None:
        """Train in a loop of one's own, which says what its loss divides by."""
        model, optimizer, name = self.model, self.optimizer, keras.backend.backend()
        eager = self.get("eager", not self.together and name != "jax")
        variables, losses = model.trainable_variables, self.losses()
        optimizer.build(variables)
        backend: Any = {"tensorflow": _with_tensorflow, "torch": _with_torch, "jax": _with_jax}
        counted = self.together and self.reduction != "sum" and self.get("op") != "sum"

        def loss_of(outputs: Any, targets: Any, weights: Any) -> Any:
            outputs = outputs if len(losses) > 1 else [outputs]
            targets = targets if len(losses) > 1 else [targets]
            parts = [
                self.factor * each(y, o, None if weights is None else weights)
                for each, y, o in zip(losses, targets, outputs, strict=True)
                if each is not None
            ]
            loss = sum(parts[1:], parts[0])
            return optimizer.scale_loss(loss) if self.get("scale") else loss

        step = backend[name](model, optimizer, loss_of, eager, counted)
        for number in range(self.count):
            x, y, weights = (*self.batch(number), None)[:3]
            weights = weights[0] if isinstance(weights, tuple) else weights
            by_weight = self.reduction == "mean_with_sample_weight" and weights is not None
            rows = len(keras.tree.flatten(x)[0])
            step(float(weights.sum()) if by_weight else float(rows), x, y, weights)


def _with_tensorflow(model: Any, optimizer: Any, loss_of: Any, eager: bool, counted: bool) -> Any:
    import tensorflow as tf

    def step(count: Any, x: Any, y: Any, weights: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model(x, training=True), y, weights)
        if counted:
            optimizer.sample_weight = count
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    function: Any = step if eager else tf.function(step, reduce_retracing=True)
    return lambda *given: function(
        *tf.nest.map_structure(tf.convert_to_tensor, given[:3]), given[3]
    )


def _with_torch(model: Any, optimizer: Any, loss_of: Any, eager: bool, counted: bool) -> Any:
    import torch

    def step(count: float, x: Any, y: Any, weights: Any) -> None:
        model.zero_grad()
        loss_of(model(x, training=True), y, weights).backward()
        if counted:
            optimizer.sample_weight = count
        variables = model.trainable_variables
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in variables], variables)

    return step


def _with_jax(model: Any, optimizer: Any, loss_of: Any, eager: bool, counted: bool) -> Any:
    import jax

    def loss(values: Any, fixed: Any, x: Any, y: Any, weights: Any) -> Any:
        return loss_of(model.stateless_call(values, fixed, x, training=True)[0], y, weights)

    def step(count: Any, state: Any, *given: Any) -> Any:
        if counted:
            optimizer.sample_weight = count
        return optimizer.stateless_apply(state, jax.grad(loss)(*given), given[0])

    function = step if eager else jax.jit(step)

    def whole(count: float, *given: Any) -> None:
        groups = model.trainable_variables, optimizer.variables
        values, state = ([v.value for v in group] for group in groups)
        fixed = [v.value for v in model.non_trainable_variables]
        ends = function(count, state, values, fixed, *given)
        for group, new in zip(groups, ends, strict=True):
            for variable, value in zip(group, new, strict=True):
                variable.assign(value)

    return whole


def _array(variable: Any) -> Any:
    return np.array(keras.ops.convert_to_numpy(variable), np.float64)


def bound(program: Spec) -> float:
    """Return how far numbers of these types may be from those of one process."""
    half = {"bf16": 0.1, "fp16": 0.02}
    exchange = program.get("options", {}).get("exchange", "")
    # On torch and JAX, Keras computes some of its operations on float64 in float32.
    exact = keras.backend.backend() == "tensorflow" and not program.get("f32")
    return max([1e-9 if exact else 1e-4, *(half[name] for name in half if name in exchange)])


def run(program: Spec, rank: int, size: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    keras.config.disable_traceback_filtering()
    program = program | {"size": size}
    chosen = [r for r in program.get("members", range(size)) if r < size] or list(range(size))
    group = chosen if rank in chosen else [rank]
    try:
        alone = Training(program, group, group).train()
    except Exception as error:
        return failure(error, "keras") | {"outcome": "invalid"}
    hvd.init()
    try:
        process_set = hvd.global_process_set
        if len(chosen) < size:
            process_set = hvd.add_process_set(chosen)
        training = Training(program, [rank], group, process_set)
        result = compare(alone, training.train(), bound(program))
        weights = {w.path: _array(w) for w in training.model.weights}
        result["bits"] = digest(weights) if rank in chosen else None
        del training
    except Exception as error:
        return failure(error, "keras")
    hvd.shutdown()
    return result
