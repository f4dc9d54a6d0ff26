"""Callbacks: what a user's own objects do at the moments of a run, and how they stop it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.collective import collective
from hvdtrain.core.exits import own_frame
from hvdtrain.core.objects import allgather_object, vote
from hvdtrain.errors import (
    HvdtrainError,
    OneRankTrainingError,
    TrainingError,
    UnsupportedError,
    UsageError,
)
from hvdtrain.train.metrics import Values

__all__ = ["Callback", "CallbackState"]


@dataclass(frozen=True)
class CallbackState:
    """A run at one moment.

    Attributes:
        epoch: number of the epoch, from 1.
        step: optimizer steps since the very first start.
        lr: learning rate of the last step.
        train: in on_epoch_end loss and metrics of the epoch over all ranks; in on_train_batch_end
            the loss of this rank's samples of the step (with Keras its mean since the last pause).
        test: loss and metrics of the last evaluation; empty before the first.
        model, optimizer: those of this rank, which callbacks may change alike on all ranks.
    """

    epoch: int
    step: int
    lr: float
    train: Values
    test: Values
    model: Any
    optimizer: Any
    rank: int
    size: int


class Callback:
    """Base class of callbacks; every method may be overridden, and is called on every rank.

    Attributes:
        stop: set it to True, on one rank or more, to end the run: all ranks stop in the same step.
    """

    stop = False

    def on_train_begin(self, state: CallbackState) -> None:
        """Training begins, or resumes."""

    def on_epoch_begin(self, state: CallbackState) -> None:
        """An epoch begins."""

    def on_train_batch_end(self, state: CallbackState) -> None:
        """A step is done."""

    def on_test_end(self, state: CallbackState) -> None:
        """An evaluation is done."""

    def on_epoch_end(self, state: CallbackState) -> None:
        """An epoch is done, its evaluation included."""

    def on_train_end(self, state: CallbackState) -> None:
        """The last step is done; what the model is now, is evaluated and saved."""


MOMENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))

# Errors that other ranks need not have.
_OF_ONE_RANK = (UnsupportedError, UsageError)


class Callbacks:
    """The callbacks of a run.

    Args:
        verbose: whether errors of callbacks are told with their traceback.

    Attributes:
        stop_rank: the first rank on which a callback has asked to stop; None: no rank.
    """

    @collective
    def __init__(self, callbacks: Sequence[Callback], verbose: bool) -> None:
        self._callbacks, self._verbose = callbacks, verbose
        self.stop_rank: int | None = None
        own = {n for n in MOMENTS for c in callbacks if getattr(type(c), n) != getattr(Callback, n)}
        self._moments = set().union(*allgather_object(own, "callbacks"))

    def take(self, moment: str) -> bool:
        """Return whether a callback of any rank does something at a moment."""
        return moment in self._moments

    @collective
    def call(self, moment: str, make_state: Callable[[], CallbackState]) -> None:
        """Call the callbacks of this rank, and agree with the other ranks whether to go on."""
        if not self.take(moment):
            return
        problem = ""
        try:
            state = make_state() if self._callbacks else None
            for callback in self._callbacks:
                getattr(callback, moment)(state)
        except Exception as error:
            if isinstance(error, HvdtrainError) and not isinstance(error, _OF_ONE_RANK):
                raise  # by a collective operation that they have called
            problem = own_frame(error, self._verbose)
        stops = any(callback.stop for callback in self._callbacks)
        alone = OneRankTrainingError(f"callback failed at {problem}") if problem else None
        stopping, failed = vote([stops, bool(problem)], "callbacks", alone)
        if failed.any():
            problems = allgather_object(problem, "callbacks")
            rank, problem = next((rank, text) for rank, text in enumerate(problems) if text)
            where = "" if all(problems) else f"rank {rank}: "
            raise TrainingError(f"{where}callback failed at {problem}")
        if stopping.any():
            self.stop_rank = int(stopping.argmax())
