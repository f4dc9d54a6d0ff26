"""What a run needs of a framework: the seam between it and the frameworks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy.typing as npt

from hvdtrain.data.dataset import Dataset
from hvdtrain.devices import Device
from hvdtrain.topology import Topology
from hvdtrain.train.course import Course
from hvdtrain.train.results import Score, Sums

__all__ = ["Array", "Framework", "Loop", "Recipe", "State"]

Array = npt.NDArray[Any]


class State(Protocol):
    """The weights and the optimizer of this rank.

    Attributes:
        suffix: of the files that checkpoints are written to, one of checkpoint.FORMATS.
    """

    suffix: str

    def weights(self) -> Mapping[str, Array]:
        """Return the model's weights by name, always in the same order."""

    def content(self) -> dict[str, Any]:
        """Return what a checkpoint holds: "model", by name, and "optimizer"."""

    def load(self, content: Mapping[str, Any]) -> None:
        """Take over what content() gave; its "model" fits by name and shape.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, RuntimeError: it lacks something.
        """


class Loop(Protocol):
    """A model in training: its weights, its optimizer and its share of the data."""

    state: State

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""

    def broadcast(self) -> None:
        """Give every rank the weights and the optimizer state of rank 0 (collective)."""

    def train_epoch(self, epoch: int, done: int, go_on: Callable[[], bool]) -> Sums:
        """Use every training sample that is left once; return sums while learning (collective).

        Args:
            epoch: counted from 0.
            done: how many of its samples were used before.
            go_on: called after each optimizer step; where it returns False, on all ranks at the
                same step, that was the last one.
        """

    def evaluate(self) -> Score:
        """Return the mean score over all test samples, each seen by one rank (collective)."""


class Recipe(Protocol):
    """What is trained, as far as all frameworks know it."""

    @property
    def name(self) -> str:
        """What it is called on the command line and in checkpoints."""

    @property
    def load_data(self) -> Callable[[], Dataset]:
        """Returns the training and the test samples."""


class Framework(Protocol):
    """How one framework trains."""

    @property
    def title(self) -> str:
        """What people are told."""

    @property
    def recipe(self) -> Recipe:
        """What is trained."""

    def prepare(self, topology: Topology) -> Device:
        """Pin one GPU per local rank or take a share of the cores; tell which device (local).

        Raises:
            UsageError: what was asked for is not there, or does not fit the world.
        """

    def make_loop(self, course: Course, data: Dataset) -> Loop:
        """Build the model and its optimizer; maybe collective."""
