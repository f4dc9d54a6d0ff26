"""The interface between a training run and the frameworks that it trains with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hvdtrain.collective import collective
from hvdtrain.core.gradients.exchange import SavedExchange
from hvdtrain.core.objects import broadcast_object, gather_object, scatter_object
from hvdtrain.devices import Device
from hvdtrain.errors import UsageError
from hvdtrain.topology import Topology
from hvdtrain.train.callbacks import Callback
from hvdtrain.train.checkpoints import Checkpointable, TensorLibrary
from hvdtrain.train.config_file import counted
from hvdtrain.train.loop.step_plan import StepPlan
from hvdtrain.train.metrics import RatedMetric, SummedMetric, Totals, Values
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.parameter_server.protocol import Pushes
from hvdtrain.train.recipe import Recipe

# An array of any shape and element type.
Array = npt.NDArray[Any]


class TrainingState(Checkpointable, Protocol):
    """The weights, the optimizer state and everything else of this rank that checkpoints hold."""

    def weights(self) -> Mapping[str, Array]:
        """Return the weights of the model by name, always in the same order."""

    def reserve(self) -> None:
        """Allocate the memory of snapshots; call it after the first step, on rank 0."""

    def load(self, content: Mapping[str, Any]) -> None:
        """Restore the state from the content of a snapshot."""

    def load_weights(self, content: Mapping[str, Any]) -> None:
        """Restore the weights alone, averaged ones included, from the content of a snapshot."""

    def optimizer_state(self) -> Mapping[Any, Any]:
        """Return the optimizer's state of this rank alone, for an exchange of weights."""

    def load_optimizer(self, state: Mapping[Any, Any]) -> None:
        """Restore what optimizer_state() has returned."""


class TrainingLoop(ABC):
    """A model in training: its weights, its optimizer and this rank's share of the data."""

    state: Any  # a TrainingState, which checkpoints hold
    metrics: Mapping[str, SummedMetric]  # that are summed while training, by name
    test_metrics: Mapping[str, RatedMetric]  # of evaluations, by name
    gradient_bytes: int  # that a step reduces
    _step_plan: StepPlan
    _model: Any
    _optimizer: Any
    _rounds: Any = None  # ServedRounds, with a parameter server

    @property
    @abstractmethod
    def lr(self) -> float:
        """The learning rate of the last step."""

    @property
    def trained(self) -> tuple[Any, Any]:
        """The model and its optimizer."""
        return self._model, self._optimizer

    def lend(self) -> tuple[Any, Any]:
        """Return the model and its optimizer to callbacks, which may change them."""
        if self._rounds is not None:
            self._rounds.lent = True
        return self.trained

    @abstractmethod
    def own_loss(self) -> float:
        """Return the mean loss of this rank's samples of the last step; call it after each step."""

    def callbacks(self, *given: Any) -> list[Callback]:
        """Return a user's callbacks, which may be the framework's, as ones of this package."""
        for several in given:
            if not isinstance(several, Sequence):
                raise UsageError(f"callbacks are a {type(several).__name__}: give a list of them")
        return [self._callback(one) for several in given for one in several]

    def _callback(self, given: Any) -> Callback:
        if isinstance(given, Callback):
            return given
        raise UsageError(
            f"a callback is a {type(given).__name__}: give an object of a class that is derived "
            "from hvdtrain.train.Callback"
        )

    @property
    def shares_optimizer(self) -> bool:
        """Whether ranks share the optimizer's work."""
        return bool(getattr(self._optimizer, "sharded", False))  # not of a server's optimizer

    @property
    def pushes(self) -> Pushes | None:
        """The gradients that servers have received in this start, over all shards, if any serve."""
        pushes: Pushes | None = getattr(self._rounds, "pushes", None)
        return pushes

    @collective
    @abstractmethod
    def broadcast(self) -> None:
        """Copy the weights and the optimizer state of rank 0 to every rank."""

    @property
    def _exchanges_weights(self) -> bool:
        return self._rounds is None and bool(self._optimizer.exchanges_weights)

    @property
    def synchronized(self) -> bool:
        """Whether the weights of all ranks are equal at this step; the same on all ranks.

        With a parameter server they always are after train().
        """
        return self._rounds is not None or bool(self._optimizer.synchronized)

    @collective
    @abstractmethod
    def synchronize(self) -> None:
        """Make weights equal, and average the statistics of forward passes.

        Only exchanges of weights let weights drift apart.
        """

    @collective
    def gather_state(self) -> None:
        """Bring to rank 0 what its snapshots hold, and only all ranks together have.

        It lasts until the next step.
        """
        return

    @collective
    def exchange_record(self) -> dict[str, Any] | None:
        """Return the state of the exchange on all ranks, on rank 0, after synchronize()."""
        if self._step_plan.options.make_exchange() is None:
            return None
        saved: SavedExchange = self._optimizer.exchange_state()
        optimizer = self.state.optimizer_state() if self._optimizer.exchanges_weights else {}
        ranks = gather_object({"own": saved["own"], "optimizer": optimizer}, name="exchange")
        if ranks is None:
            return None
        return {**{name: saved[name] for name in ("spec", "steps", "shared")}, "ranks": ranks}

    @collective
    def restore_exchange(self, record: Mapping[str, Any] | None) -> str:
        """Restore what exchange_record() returned, after broadcast(), and return what is lost."""
        exchange, topology = self._step_plan.options.make_exchange(), self._step_plan.topology
        spec = None if exchange is None else exchange.spec
        ranks = [] if record is None else record["ranks"]
        told = None
        if record is not None:
            # A checkpoint of torch holds tensors.
            shared = {name: np.asarray(array) for name, array in record["shared"].items()}
            held = [any(state[part] for state in ranks) for part in ("own", "optimizer")]
            told = record["spec"], record["steps"], shared, len(ranks), held
        told = broadcast_object(told, name="exchange")
        before = None if told is None else told[0]
        if before != spec:
            begins = f"exchange {spec!r} starts from the beginning" if spec else ""
            return (
                f"the checkpoint was made with exchange {before or 'average'!r}: "
                f"{begins or 'its state is not used'}"
            )
        if told is None:
            return ""
        made_by, steps, shared, size, held = told
        mine: dict[str, Any] = {"own": {}, "optimizer": {}}
        if size == topology.size:
            mine = scatter_object(ranks or None, name="exchange")
        own = {name: np.asarray(array) for name, array in mine["own"].items()}
        saved = SavedExchange(spec=made_by, steps=steps, ranks=size, shared=shared, own=own)
        self._optimizer.load_exchange_state(saved)
        if mine["optimizer"]:
            self.state.load_optimizer(mine["optimizer"])
        texts = (
            f"each rank's private state of exchange {spec!r} is reset",
            "all ranks continue with the optimizer state of rank 0",
        )
        lost = [text for text, was_held in zip(texts, held, strict=True) if was_held]
        if size == topology.size or not lost:
            return ""
        made, run = counted(size, "rank"), topology.size
        return f"the checkpoint is one of {made}, and this run has {run}: {', and '.join(lost)}"

    @collective
    def use_bucket_plan(self, plan: Any) -> None:
        """Reduce gradients in the order of a checkpoint (before the first step)."""
        return

    def bucket_plan(self) -> Any:
        """Return the order of gradients as plain data; None if it is always that of variables."""
        return None

    @collective
    @abstractmethod
    def train(self, epoch: int, done: int, go_on: Callable[[], bool]) -> Totals:
        """Train on the samples that are left of an epoch."""

    def use_step_plan(self, step_plan: StepPlan) -> None:
        """Train by another plan from the next epoch on."""
        self._step_plan = step_plan

    def fits(self, epoch: int) -> bool:
        """Return whether this rank has the memory for the first step of an epoch, if it can tell.

        It communicates only where the model does.
        """
        return True

    @collective
    @abstractmethod
    def evaluate(self) -> Values:
        """Return loss and metrics of all test samples, each seen by one rank."""

    @collective
    @abstractmethod
    def predict(self, inputs: Array) -> Array:
        """Return the outputs of the model for samples [n, ...], the same on every rank."""

    @abstractmethod
    def checksums(self) -> Mapping[str, int]:
        """Return a checksum of everything that must be equal on all ranks, by name."""


class Framework(ABC):
    """Trains recipes with one framework."""

    title: str  # for people
    tensor_library: TensorLibrary  # whose tensors checkpoints are read as

    def __init__(self, options: TrainOptions) -> None:
        self._options = options

    @abstractmethod
    def prepare(self, topology: Topology) -> None:
        """Pin one GPU per local rank, or take a share of the cores."""

    @abstractmethod
    def build(self, make_recipe: Callable[[], Recipe], topology: Topology) -> Recipe:
        """Call a recipe with this rank's random generators seeded, and check it.

        Rank 0's weights are broadcast. The others start from different ones, so that a broadcast
        that failed shows in the digests.
        """

    @abstractmethod
    def device(self) -> Device:
        """Return the device that this rank computes on; call it after build()."""

    def threads(self) -> int | None:
        """Return the number of threads that this rank computes with; None: unknown."""
        return None

    def use_threads(self, threads: int) -> None:
        """Set the number of threads where it can be set, unless the user has set it."""
        return

    @collective
    @abstractmethod
    def make_loop(self, recipe: Recipe, step_plan: StepPlan) -> TrainingLoop:
        """Prepare the optimizer and return the loop."""
