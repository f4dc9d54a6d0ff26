"""A recipe: a model, its data, its loss and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Recipe"]

# How the names of modules begin that are users' files.
MODULES = "_hvdtrain_recipe_"


@dataclass(frozen=True)
class Recipe:
    """What the function of a recipe, the user's or a built-in one, returns.

    A plain dataclass: nothing has to be inherited. `model` is built when the function is called,
    after all random generators are seeded; rank 0's weights are broadcast.

    Attributes:
        model: a torch.nn.Module or a keras.Model; it maps inputs [n, ...] to outputs [n, ...].
        train: training samples: Samples (arrays, the fastest), or anything with len() and [index]
            that returns (input, target), such as torch's map-style datasets, or an iterable of
            (input, target), such as torch's IterableDataset, together with samples_per_epoch.
        loss: for torch a function of outputs and targets that returns the mean over the batch,
            a scalar; for Keras a keras.losses.Loss.
        test: test samples: Samples, or anything with len() and [index]; None: no evaluation.
        optimizer: for torch makes an optimizer from the parameters and the initial learning rate;
            for Keras from the learning rate, a number or a schedule; None: --optimizer decides.
        metrics: metrics by name, besides the loss: from hvdtrain.train.metrics for torch, from
            keras.metrics for Keras.
        augment: changes the input of a training sample, given a generator that depends on seed,
            epoch and sample alone, and never on the number of ranks or of loader processes.
        collate: makes a batch, (inputs, targets), from a list of samples; None: torch's default.
        samples_per_epoch: number of samples that an iterable must yield at least.
        read: returns inputs [n, ...] from a file, for `predict`; None: numpy's .npy.
        classes: names of the classes, for `predict`.
        most_threads: maximum number of threads per rank; more would be slower.
        callbacks: hvdtrain.train.Callback objects; with Keras also keras.callbacks.Callback.
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
    callbacks: Sequence[Any] = ()
