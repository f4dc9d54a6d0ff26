"""Arguments of Keras's `fit`: batches of this rank, a callback after each step, learning rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.data.sampling.seeds import seed_generators, step_seed
from hvdtrain.data.sampling.sharding import Indices
from hvdtrain.keras.tensors.types import Tensor
from hvdtrain.train.keras.sample_reader import SampleReader
from hvdtrain.train.loop.protocol import Array
from hvdtrain.train.loop.step_plan import StepPlan, padded


class BatchDataset(keras.utils.PyDataset):  # type: ignore[misc]
    """The batches of this rank in one epoch, padded to one length and read one by one."""

    def __init__(
        self,
        reader: SampleReader,
        step_plan: StepPlan,
        batches: Sequence[Indices],
        rows: int,
        epoch: int,
        scale: float | None = 1.0,
    ) -> None:
        super().__init__()
        self._reader, self._step_plan, self._epoch = reader, step_plan, epoch
        self._batches, self._rows, self._scale = batches, rows, scale

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: int) -> tuple[Array, Array, Array]:
        """Return inputs [rows, ...], targets [rows, ...] and sample weights [rows]."""
        rows, counted = self._padded(self._batches[number])
        inputs, targets = self._reader.read(rows, self._epoch)
        return inputs, targets, self._weights(self._batches[number], counted)

    def _padded(self, batch: Indices) -> tuple[Indices, Array]:
        return padded(batch[self._step_plan.own_slice(len(batch))], self._rows)

    def _weights(self, batch: Indices, counted: Array) -> Array:
        """Return the weights of this rank's samples, [rows]; padding has weight 0."""
        factor = 1 / max(1, counted.sum()) if self._scale is None else self._scale / len(batch)
        weights: Array = (factor * counted).astype(self._step_plan.options.dtype)
        return weights

    def joined(self) -> dict[str, Array | int]:
        """Return all batches in one piece as arguments of `fit`, which is faster that way."""
        parts = [self._padded(batch) for batch in self._batches]
        inputs, targets = self._reader.read(np.concatenate([rows for rows, _ in parts]))
        pairs = zip(self._batches, parts, strict=True)
        weights = np.concatenate([self._weights(batch, counted) for batch, (_, counted) in pairs])
        return {"x": inputs, "y": targets, "sample_weight": weights, "batch_size": self._rows}


def counted_samples(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Return the number of samples of a batch of BatchDataset that are not padding."""
    counted: Tensor = keras.ops.sum(keras.ops.cast(keras.ops.greater(weights, 0), "float32"))
    return counted


class StepCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Seeds the random generators before each step, and asks after it whether to continue."""

    def __init__(
        self,
        step_plan: StepPlan,
        first: int,
        note: Callable[[int], None],
        go_on: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._step_plan, self._first, self._note, self._go_on = step_plan, first, note, go_on
        self.taken = 0

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, object] | None = None) -> None:
        """Seed for this step and rank: on torch, Dropout draws from torch's own generator."""
        seed, rank = self._step_plan.options.seed, self._step_plan.topology.rank
        seed_generators(step_seed(seed, self._first + batch, rank))
        self._note(batch)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, object] | None = None) -> None:
        """Stop `fit` after this step if `go_on` returns False."""
        self.taken += 1
        if not self._go_on():
            self.model.stop_training = True


class StepPlanSchedule(
    keras.optimizers.schedules.LearningRateSchedule  # type: ignore[misc]
):
    """The learning rates of a step plan, as part of the compiled step."""

    def __init__(self, step_plan: StepPlan) -> None:
        self.ahead: int | None = None
        steps = step_plan.schedule.steps
        rates = [step_plan.lr(step) for step in range(steps)]
        self._rates = np.array(rates, keras.config.floatx())

    def __call__(self, step: Any) -> Any:
        """Return the learning rate of a step, a tensor of the backend."""
        index = keras.ops.cast(step, "int32") + (self.ahead or 0)
        index = keras.ops.clip(index, 0, len(self._rates) - 1)
        return keras.ops.take(keras.ops.convert_to_tensor(self._rates), index)
