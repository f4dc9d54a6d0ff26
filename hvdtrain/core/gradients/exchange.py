"""The exchange interface: how ranks combine their filled buckets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core.agreement.request import Zeros
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.filled_bucket import FilledBucket, ParameterSlice, ParameterView
from hvdtrain.core.gradients.inner_state import InnerState
from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.core.gradients.step_info import LocalSteps, StepInfo
from hvdtrain.types import DType, ReduceOp

__all__ = [
    "Exchange",
    "ExchangeState",
    "FilledBucket",
    "InnerState",
    "Kind",
    "LocalSteps",
    "ParameterSlice",
    "ParameterView",
    "StepInfo",
]


class Kind(Enum):
    """The contents of buckets."""

    GRADIENTS = "gradients"
    WEIGHTS = "weights"


@dataclass(frozen=True)
class ExchangeState:
    """The state of an exchange, in host memory, for a checkpoint.

    Attributes:
        shared: arrays that are equal on all ranks, by name.
        own: arrays of this rank, by name.
    """

    shared: Mapping[str, HostArray] = field(default_factory=dict)
    own: Mapping[str, HostArray] = field(default_factory=dict)


class Exchange(ABC):
    """An algorithm that combines the buckets of all ranks; one object per optimizer.

    An algorithm accesses a bucket either as a whole, or as views in the shapes of its parameters,
    as numpy arrays or torch tensors (see hvdtrain.arrays). It must keep its state by parameter,
    because the assignment of parameters to buckets changes after the first step.

    Attributes:
        spec: description on which ranks must agree, e.g. "allreduce:op=average".
        exactness: one sentence for users: how the result differs from the exact average.
        kind: contents of the buckets; weights are those after the inner optimizer's step.
        whole_tensors: whether it needs whole parameters, instead of any range of elements.
        half_types: whether it takes half types if the engine adds them; otherwise their buckets
            are float32, and numpy arrays never hold the bits of a bfloat16.
        hierarchical: whether it sums within a node first, and concerns only the network between
            nodes; otherwise each rank counts as a node.
        checks_finite: whether `end` needs to know if all results are finite, and for which
            parameters no rank had a gradient.
        uses_rate: whether `reduce` needs the learning rate.
        uses_scale: whether `reduce` needs the scale of the loss, because it keeps what belongs to
            later gradients, which may have another scale.
        op: AVERAGE, or SUM if it sums; sparse gradients, which it never gets, are reduced so, too.
        takes_samples: whether ranks may count with their samples; otherwise all count alike.
        counts_samples: whether `due` needs the number of samples in a step.
        inner_state: what becomes of the states of the ranks' own optimizers after an exchange of
            weights; nothing in a warm-up.
        in_warm_up: whether it takes plain averages at present, before its own algorithm.
        partial: whether an exchange of weights that is due leaves some parameters as they are,
            so that only a flush makes the weights equal.
        looks_ahead: whether ranks go on from other weights than the model's, to which a flush
            returns even if no rank has taken a step.
        first: exchange of gradients that is used instead of an exchange of weights until this is
            None; `due` or `load` may change it.
        in_place: whether it reduces gradients that lie outside their buckets, too.
        at_once: whether buckets are launched together when all gradients are ready, because nothing
            is gained by reducing some earlier.
        stateless: whether it keeps nothing from step to step, so that it can reduce any gradients.
    """

    spec: str
    exactness: str
    kind: Kind = Kind.GRADIENTS
    whole_tensors: bool = False
    half_types: bool = False
    hierarchical: bool = False
    checks_finite: bool = False
    uses_rate: bool = False
    uses_scale: bool = False
    op: ReduceOp = ReduceOp.AVERAGE
    takes_samples: bool = True
    counts_samples: bool = False
    inner_state: InnerState = InnerState.KEEP
    in_warm_up: bool = False
    partial: bool = False
    looks_ahead: bool = False
    first: Exchange | None = None
    in_place: bool = False
    at_once: bool = False
    stateless: bool = False

    @property
    def chosen(self) -> Mapping[str, str] | None:
        """The exchange chosen for each parameter, by name of the parameter; None if none is."""
        return None

    def prepare(self, plan: BucketPlan) -> None:  # noqa: B027  # most need nothing
        """Prepare for a plan, when it is made and whenever it changes (local).

        Raises:
            ValueError: it cannot exchange one of these parameters.
        """

    def note_alone(self) -> None:  # noqa: B027  # most need not know
        """Learn that there is one rank, for which `reduce` is not called (local)."""

    def silence(self) -> None:  # noqa: B027  # most print nothing
        """Print nothing from now on (local)."""

    def begin(self, bucket: FilledBucket) -> None:  # noqa: B027  # only for weights
        """Receive the weights that all ranks have in common (local).

        Called with every bucket before the first step and before the first step after each
        exchange, if the kind is WEIGHTS. The bucket is overwritten later, so copy what has to be
        kept.
        """

    def due(self, steps: LocalSteps) -> bool:
        """Return whether weights are exchanged after a step (local).

        A rank for which it is true earlier than for others waits for them.

        Args:
            steps: steps since the last exchange.

        Raises:
            ValueError: it cannot tell from these steps.
        """
        return True

    @abstractmethod
    @collective
    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        """Overwrite a bucket with the result, the same bits on all ranks (collective).

        Args:
            bucket: bucket of this rank, the next one of the plan.
            info: information about the step.
            communicators: communicators of the ranks.

        Raises:
            AgreedError: an error that all ranks raise here.
        """

    def end(self, info: StepInfo) -> None:  # noqa: B027  # most need nothing
        """End a step, after all of its buckets are reduced (local)."""

    def zeros(self, kinds: Sequence[tuple[int, DType]]) -> Zeros | None:
        """Return the parameters with which a joined rank takes part; None if it cannot.

        Args:
            kinds: number and type of the elements of each bucket, and of the integers that are
                summed after them.
        """
        return None

    def state(self) -> ExchangeState:
        """Return a copy of the state (local)."""
        return ExchangeState()

    def load(self, state: ExchangeState) -> None:
        """Restore a state that state() has returned on the rank of the same number (local).

        On another number of ranks it has no arrays in `own`, and each rank begins anew.

        Raises:
            ValueError: the state belongs to another exchange.
        """
        if state.shared or state.own:
            names = ", ".join(sorted({*state.shared, *state.own}))
            raise ValueError(f"exchange {self.spec!r} keeps nothing, but was given {names}")
