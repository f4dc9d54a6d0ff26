"""The interface between a training run and the frameworks that it trains with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core.exchanges.state import SavedExchange
from hvdtrain.core.objects import broadcast_object, gather_object, scatter_object
from hvdtrain.devices import Device
from hvdtrain.errors import UsageError
from hvdtrain.topology import Topology
from hvdtrain.train.callbacks import Callback
from hvdtrain.train.checkpoint.saver import Checkpointable
from hvdtrain.train.checkpoint.tensor_file import TensorLibrary
from hvdtrain.train.config_file import counted
from hvdtrain.train.loop.step_plan import StepPlan
from hvdtrain.train.metrics import RatedMetric, SummedMetric, Totals, Values
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.parameter_server.protocol import Pushes
from hvdtrain.train.recipe import Recipe

# The state of an optimizer, as a checkpoint of its framework holds it.
OptimizerState: TypeAlias = Mapping[Any, Any]


class RankState(TypedDict):
    """What belongs to one rank alone."""

    own: dict[str, HostArray]
    optimizer: OptimizerState


class ExchangeRecord(TypedDict):
    """The state of an exchange on all ranks, as a checkpoint holds it."""

    spec: str
    steps: int
    shared: dict[str, HostArray]
    ranks: list[RankState]


@dataclass(frozen=True)
class RecordHeader:
    """A record without the states of the ranks."""

    saved: SavedExchange
    own: bool
    optimizers: bool


def lost_text(header: RecordHeader | None, spec: str | None, size: int) -> str:
    """Return one line on the state of an exchange that a resumed run drops; "" if none."""
    before = None if header is None else header.saved["spec"]
    if before != spec:
        begins = f"exchange {spec!r} starts from the beginning" if spec else "its state is not used"
        return f"the checkpoint was made with exchange {before or 'average'!r}: {begins}"
    if header is None or header.saved["ranks"] == size:
        return ""
    parts = []
    if header.own:
        parts.append(f"each rank's private state of exchange {spec!r} is reset")
    if header.optimizers:
        parts.append("all ranks continue with the optimizer state of rank 0")
    ranks = counted(header.saved["ranks"], "rank")
    lost = f"the checkpoint is one of {ranks}, and this run has {size}: {', and '.join(parts)}"
    return lost if parts else ""


def _header(record: ExchangeRecord) -> RecordHeader:
    # A checkpoint of torch holds tensors.
    shared = {name: np.asarray(array) for name, array in record["shared"].items()}
    ranks = record["ranks"]
    return RecordHeader(
        SavedExchange(
            spec=record["spec"], steps=record["steps"], ranks=len(ranks), shared=shared, own={}
        ),
        any(state["own"] for state in ranks),
        any(state["optimizer"] for state in ranks),
    )


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

    def optimizer_state(self) -> OptimizerState:
        """Return the optimizer's state of this rank alone, for an exchange of weights."""

    def load_optimizer(self, state: OptimizerState) -> None:
        """Restore what optimizer_state() has returned."""


class TrainingLoop(ABC):
    """A model in training: its weights, its optimizer and this rank's share of the data.

    Attributes:
        state: what checkpoints hold.
        metrics: metrics that are summed while training, by name.
        test_metrics: metrics of evaluations, by name.
        gradient_bytes: bytes of gradients that a step reduces.
    """

    state: Any  # a TrainingState
    metrics: Mapping[str, SummedMetric]
    test_metrics: Mapping[str, RatedMetric]
    gradient_bytes: int
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
    def exchange_record(self) -> ExchangeRecord | None:
        """Return the state of the exchange on all ranks, on rank 0, after synchronize()."""
        if self._step_plan.options.make_exchange() is None:
            return None
        saved: SavedExchange = self._optimizer.exchange_state()
        own = self.state.optimizer_state() if self._optimizer.exchanges_weights else {}
        ranks = gather_object(RankState(own=saved["own"], optimizer=own), name="exchange")
        if ranks is None:
            return None
        return ExchangeRecord(
            spec=saved["spec"], steps=saved["steps"], shared=saved["shared"], ranks=ranks
        )

    @collective
    def restore_exchange(self, record: ExchangeRecord | None) -> str:
        """Restore the state of the exchange, after broadcast(), and return what is lost."""
        exchange, topology = self._step_plan.options.make_exchange(), self._step_plan.topology
        spec = None if exchange is None else exchange.spec
        header: RecordHeader | None = broadcast_object(record and _header(record), name="exchange")
        lost = lost_text(header, spec, topology.size)
        if header is None or header.saved["spec"] != spec:
            return lost
        mine = RankState(own={}, optimizer={})
        if header.saved["ranks"] == topology.size:
            states = record["ranks"] if record is not None and topology.rank == 0 else None
            mine = scatter_object(states, name="exchange")
        own = {name: np.asarray(array) for name, array in mine["own"].items()}
        self._optimizer.load_exchange_state({**header.saved, "own": own})
        if mine["optimizer"]:
            self.state.load_optimizer(mine["optimizer"])
        return lost

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

    @collective
    @abstractmethod
    def evaluate(self) -> Values:
        """Return loss and metrics of all test samples, each seen by one rank."""

    @collective
    @abstractmethod
    def predict(self, inputs: Array) -> Array:
        """Return the outputs of the model, the same on every rank.

        Args:
            inputs: samples, [n, ...].
        """

    @abstractmethod
    def checksums(self) -> Mapping[str, int]:
        """Return a checksum of everything that must be equal on all ranks, by name."""


class Framework(ABC):
    """Trains recipes with one framework.

    Attributes:
        title: the name of the framework for people.
        tensor_library: the library whose tensors checkpoints are read as.
    """

    title: str
    tensor_library: TensorLibrary

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
