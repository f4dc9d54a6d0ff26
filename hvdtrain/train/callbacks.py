"""Callbacks: what a user's own objects do at the moments of a run, and how they stop it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core import operations
from hvdtrain.core.exits import own_frame
from hvdtrain.core.membership.world import Context
from hvdtrain.core.objects import allgather_object
from hvdtrain.errors import HvdtrainError, OneRankTrainingError, TrainingError
from hvdtrain.polling import poll_until
from hvdtrain.train.metrics import Values
from hvdtrain.types import ReduceOp

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

# How long a rank whose callback has failed waits for the others to hear of it.
_LONGEST_SECONDS = 5.0


class Callbacks:
    """The callbacks of a run.

    Attributes:
        stop_rank: the first rank on which a callback has asked to stop; None: no rank.
    """

    @collective
    def __init__(self, callbacks: Sequence[Callback], world: Context) -> None:
        self._callbacks, self._world = callbacks, world
        self.stop_rank: int | None = None
        own = {n for n in MOMENTS for c in callbacks if getattr(type(c), n) != getattr(Callback, n)}
        self._moments = set().union(*allgather_object(own, "callbacks"))

    def take(self, moment: str) -> bool:
        """Return whether a callback of any rank does something at a moment."""
        return moment in self._moments

    @collective
    def call(self, moment: str, state: Callable[[], CallbackState]) -> None:
        """Call the callbacks of this rank, and agree with the other ranks whether to go on."""
        if not self.take(moment):
            return
        problem = ""
        try:
            for callback in self._callbacks:
                getattr(callback, moment)(state())
        except HvdtrainError:  # of a collective operation that they have called
            raise
        except Exception as error:
            problem = own_frame(error)
        topology = self._world.topology
        votes = np.zeros((2, topology.size))
        votes[:, topology.rank] = any(callback.stop for callback in self._callbacks), bool(problem)
        vote = operations.allreduce(
            self._world.world, [Buffer.from_array(votes)], [votes.shape], ReduceOp.SUM, "callbacks"
        )
        if problem:  # others may wait in an operation that this rank will not come to
            end = time.monotonic() + _LONGEST_SECONDS
            vote.start()
            poll_until(lambda: vote.done() or time.monotonic() > end)
            if not vote.done():
                raise OneRankTrainingError(f"callback failed at {problem}")
            vote.wait()
        else:
            vote.run()
        if votes[1].any():
            problems = allgather_object(problem, "callbacks")
            rank, problem = next((rank, text) for rank, text in enumerate(problems) if text)
            where = "" if all(problems) else f"rank {rank}: "
            raise TrainingError(f"{where}callback failed at {problem}")
        if votes[0].any():
            self.stop_rank = int(votes[0].argmax())
