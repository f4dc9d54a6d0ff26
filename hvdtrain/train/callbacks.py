"""Callbacks: what a user's own objects do at the moments of a run, and how they stop it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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

__all__ = ["Callback", "CallbackState", "LearningRateMonitor", "RestoreBestWeights"]


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
        restore_best: loads the weights of the best evaluation by `--best` (collective), averaged
            ones of `--ema` included, from its checkpoint; None: there are no test samples.
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
    restore_best: Callable[[], None] | None


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


class LearningRateMonitor(Callback):
    """Keeps the learning rates of a run, as Lightning's does.

    Args:
        logging_interval: "step" keeps the rate of each step, "epoch" that of each epoch's last one.

    Attributes:
        steps: the numbers of the steps, from 1.
        lrs: their rates by name: "lr", or "lr/pg1", "lr/pg2" and so on if an optimizer of torch has
            several groups of parameters.
    """

    def __init__(self, logging_interval: Literal["step", "epoch"] = "step") -> None:
        if logging_interval not in ("step", "epoch"):
            raise UsageError(f"logging_interval {logging_interval!r}: give 'step' or 'epoch'")
        self._interval = logging_interval
        self.steps: list[int] = []
        self.lrs: dict[str, list[float]] = {}

    def on_train_batch_end(self, state: CallbackState) -> None:
        if self._interval == "step":
            self._note(state)

    def on_epoch_end(self, state: CallbackState) -> None:
        if self._interval == "epoch":
            self._note(state)

    def _note(self, state: CallbackState) -> None:
        groups = getattr(state.optimizer, "param_groups", [])
        rates = {f"lr/pg{number}": group["lr"] for number, group in enumerate(groups, 1)}
        for name, rate in (rates if len(groups) > 1 else {"lr": state.lr}).items():
            self.lrs.setdefault(name, []).append(rate)
        self.steps.append(state.step)


class RestoreBestWeights(Callback):
    """Ends a run with the weights of its best evaluation; give it to all ranks.

    Keras has restore_best_weights of EarlyStopping for it, Lightning ModelCheckpoint(save_top_k=1).
    """

    def on_train_begin(self, state: CallbackState) -> None:
        if state.restore_best is None:
            raise TrainingError("RestoreBestWeights needs a recipe with test samples")

    def on_train_end(self, state: CallbackState) -> None:
        assert state.restore_best is not None
        state.restore_best()


MOMENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))

# Errors that other ranks need not have.
_OF_ONE_RANK = (UnsupportedError, UsageError)


class Callbacks:
    """The callbacks of a run; `verbose` tells their errors with a traceback."""

    @collective
    def __init__(self, callbacks: Sequence[Callback], verbose: bool) -> None:
        self._callbacks, self._verbose = callbacks, verbose
        self.stop_rank: int | None = None  # the first on which a callback has asked to stop
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
