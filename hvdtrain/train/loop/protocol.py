"""What a run needs of a framework: the seam between it and the frameworks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import numpy.typing as npt

from hvdtrain.devices import Device
from hvdtrain.topology import Topology
from hvdtrain.train.checkpoint.saver import State as Saved
from hvdtrain.train.loop.course import Course
from hvdtrain.train.metrics.totals import Totals, Values
from hvdtrain.train.recipes.recipe import Recipe

__all__ = ["Array", "Framework", "Loop", "State"]

Array = npt.NDArray[Any]


class State(Saved, Protocol):
    """The weights and the optimizer of this rank, and what goes with them."""

    def weights(self) -> Mapping[str, Array]:
        """Return the model's weights by name, always in the same order."""

    def reserve(self) -> None:
        """Take the memory of snapshots, once the optimizer has taken a step (rank 0 only)."""

    def load(self, content: Mapping[str, Any]) -> None:
        """Take over what a snapshot gave; its "model" fits by name and shape.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, RuntimeError: it lacks something.
        """


class Loop(Protocol):
    """A model in training: its weights, its optimizer and its share of the data.

    Attributes:
        state: what checkpoints hold.
        metrics: by name, those that are counted while training.
        test_metrics: by name, those of evaluations.
        gradient_bytes: that a step reduces.
    """

    state: State
    metrics: Mapping[str, Any]
    test_metrics: Mapping[str, Any]
    gradient_bytes: int

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""

    def broadcast(self) -> None:
        """Give every rank the weights and the optimizer state of rank 0 (collective)."""

    def agree_on_buffers(self) -> None:
        """Average what a forward pass has changed on each rank, as statistics (collective)."""

    def use_plan(self, plan: Any) -> None:
        """Reduce gradients in the order of a checkpoint's plan (collective, before a step)."""

    def plan(self) -> Any:
        """Return that order as plain data; None where there is none."""

    def train(self, epoch: int, done: int, go_on: Callable[[], bool]) -> Totals:
        """Use the training samples that are left of an epoch; return sums (collective).

        Args:
            epoch: counted from 0.
            done: how many of its samples were used before.
            go_on: called after each optimizer step; where it returns False, on all ranks at the
                same step, that was the last one.
        """

    def evaluate(self) -> Values:
        """Return loss and metrics of all test samples, each seen by one rank (collective).

        Empty where the recipe has none.
        """

    def predict(self, inputs: Array) -> Array:
        """Return the outputs for inputs [n, ...], the same on every rank (collective).

        Raises:
            UsageError: the model does not take them.
        """

    def checksums(self) -> Mapping[str, int]:
        """Return a checksum of all that must be equal on all ranks, by name (local)."""


class Framework(Protocol):
    """How one framework trains."""

    @property
    def title(self) -> str:
        """What people are told."""

    @property
    def tensors(self) -> Literal["pt", "np"]:
        """What checkpoints are read as: tensors of torch, or arrays of numpy."""

    def prepare(self, topology: Topology) -> None:
        """Pin one GPU per local rank or take a share of the cores (local).

        Raises:
            UsageError: what was asked for is not there, or does not fit the world.
        """

    def build(self, make: Callable[[], Recipe], topology: Topology) -> Recipe:
        """Call a recipe with this rank's random generators seeded, and check it (local).

        Raises:
            UsageError: it does not fit the framework.
        """

    def device(self) -> Device:
        """Tell what this rank computes on, after build() (local)."""

    def threads(self) -> int | None:
        """Return how many threads this rank computes with; None: not known (local)."""

    def use_threads(self, threads: int) -> None:
        """Compute with so many threads, unless the user has set how many (local)."""

    def make_loop(self, recipe: Recipe, course: Course) -> Loop:
        """Prepare the optimizer; maybe collective."""
