"""What is trained: a model, its data, its loss and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """What a function of the user's, or a built-in one, returns.

    A plain holder: nothing has to be inherited. `model` is built when the function is called,
    after all random generators have been seeded; rank 0's weights are those that count.

    Attributes:
        model: a torch.nn.Module or a keras.Model; it maps inputs [n, ...] to outputs [n, ...].
        train: samples to train on: Samples (arrays, the fastest), or anything with len() and
            [index] that gives (input, target), as map-style datasets of torch do, or an iterable
            of (input, target), as torch's IterableDataset, together with samples_per_epoch.
        loss: for torch a function of outputs and targets that returns the mean over the batch,
            a scalar; for Keras a keras.losses.Loss.
        test: samples to evaluate on: Samples, or with len() and [index]; None: none.
        optimizer: for torch makes one from the parameters and the first learning rate; for Keras
            from the learning rate, a number or a schedule; None: what --optimizer says.
        metrics: by name, beside the loss: of hvdtrain.train.metrics for torch, keras.metrics for
            Keras.
        augment: changes the input of a training sample, given a generator that depends on seed,
            epoch and sample alone, so never on the number of ranks or of loading processes.
        collate: makes a batch, (inputs, targets), of a list of samples; None: torch's default.
        samples_per_epoch: for an iterable, which must yield as many.
        read: returns inputs [n, ...] from a file, for `predict`; None: numpy's .npy.
        classes: names of the classes, for `predict`.
        most_threads: compute threads per rank from which on more of them slow it down.
    """

    model: Any
    train: Any
    loss: Callable[..., Any]
    test: Any = None
    optimizer: Callable[..., Any] | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    augment: Callable[[Any, Any], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    samples_per_epoch: int | None = None
    read: Callable[[Path], Any] | None = None
    classes: Sequence[str] | None = None
    most_threads: int | None = None
