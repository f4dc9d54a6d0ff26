"""What is done with a filled bucket: the interface of every way in which ranks exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from hvdtrain.arrays import Array, HostArray, elements_of, strided
from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.operation import AgreedError
from hvdtrain.core.agreement.request import Zeros
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.plan import Bucket, BucketPlan, ParameterSpec
from hvdtrain.types import DType

__all__ = [
    "Exchange",
    "ExchangeState",
    "FilledBucket",
    "Kind",
    "ParameterSlice",
    "ParameterView",
    "StepInfo",
]


class Kind(Enum):
    """What buckets hold."""

    GRADIENTS = "gradients"
    WEIGHTS = "weights"


@dataclass(frozen=True)
class StepInfo:
    """What a rank knows of a step.

    Attributes:
        step: how many steps the program has ended before.
        size: how many ranks take part.
        rate: the learning rate, where the adapter knows it; only for an exchange with `uses_rate`.
        weight: what this rank counts in the average; 0 of one that has joined.
        total: the sum of all ranks' weights.
        weighted: whether a rank was given a weight; else the plain average is meant.
        finite: whether all ranks' elements are finite, once all buckets are known; only for an
            exchange with `checks_finite`.
    """

    step: int
    size: int
    rate: float | None = None
    weight: float = 1.0
    total: float = 0.0
    weighted: bool = False
    finite: bool = True

    def weigh(self, factor: float = 1.0) -> float:
        """Return `factor` times what this rank's elements count.

        With these factors, the sum over the ranks divided by `size` is the average.

        Raises:
            AgreedError: the weights of all ranks are zero.
        """
        if not self.weighted:
            return factor
        if self.total <= 0.0:
            raise AgreedError(
                ValueError("no rank has samples: the sample weights of all ranks are zero")
            )
        # Equal weights give the factor 1, and then the sum divided by the number of ranks.
        return factor * self.weight * self.size / self.total


@dataclass(frozen=True)
class ParameterView:
    """One parameter's elements.

    Attributes:
        index: the parameter's in the plan.
        start: its first element in the bucket.
        count: how many elements it has.
        array: a view of them in the parameter's shape.
    """

    index: int
    start: int
    count: int
    array: Array


@dataclass(frozen=True)
class ParameterSlice:
    """Elements of one parameter, as they lie one behind the other.

    Attributes:
        index: the parameter's in the plan.
        first: the first of them among the parameter's elements.
        count: how many the parameter has in all.
        elements: a view of them, 1-d.
    """

    index: int
    first: int
    count: int
    elements: Array


@dataclass(frozen=True)
class FilledBucket:
    """A bucket on its way, and whose elements lie where in it.

    Attributes:
        number: in the plan.
        buffer: the whole bucket.
        layout: which parameters it holds.
        specs: the plan's parameters.
    """

    number: int
    buffer: Buffer
    layout: Bucket = field(repr=False)
    specs: Sequence[ParameterSpec] = field(repr=False)

    @cached_property
    def elements(self) -> Array:
        """A view of all elements, 1-d."""
        return elements_of(self.buffer)

    @cached_property
    def parts(self) -> list[ParameterView]:
        """Views of the bucket in its parameters' shapes."""
        parts = []
        for index, start in zip(self.layout.parameters, self.layout.starts, strict=True):
            spec = self.specs[index]
            array = strided(self.elements, start, spec.count, spec.shape, spec.strides)
            parts.append(ParameterView(index, start, spec.count, array))
        return parts

    def pieces(self, elements: Array, start: int) -> list[ParameterSlice]:
        """Cut elements that belong at `start` of the bucket where its parameters begin and end."""
        end = start + elements.shape[0]
        pieces = []
        for index, begin in zip(self.layout.parameters, self.layout.starts, strict=True):
            count = self.specs[index].count
            low, high = max(start, begin), min(end, begin + count)
            if low < high:
                view = elements[low - start : high - start]
                pieces.append(ParameterSlice(index, low - begin, count, view))
        return pieces


@dataclass(frozen=True)
class ExchangeState:
    """What an exchange keeps from step to step, in host memory, for a checkpoint.

    Attributes:
        shared: arrays by name that are equal on all ranks.
        own: arrays by name that are this rank's alone.
    """

    shared: Mapping[str, HostArray] = field(default_factory=dict)
    own: Mapping[str, HostArray] = field(default_factory=dict)


class Exchange(ABC):
    """One way in which ranks make one thing of their buckets; one object per optimizer.

    An algorithm sees a bucket either whole, or as views in its parameters' shapes, as numpy arrays
    or torch tensors alike (see hvdtrain.arrays). What it keeps from step to step it keeps by
    parameter: in which bucket one lies changes after the first step.

    Attributes:
        spec: what ranks must agree on, e.g. "allreduce:op=average".
        exactness: one sentence for people: how the result differs from the exact average.
        kind: what buckets are filled with; weights are those after the inner optimizer's step.
        whole_tensors: it works on parameters; else any cut into elements will do.
        half_types: whether it takes half types if the engine adds them; otherwise their buckets
            are float32, and numpy arrays never hold the bits of a bfloat16.
        hierarchical: whether it sums within a node first, and concerns only the network between
            nodes; otherwise each rank counts as a node.
        checks_finite: it wants to know, at the end of a step, whether all elements were finite.
        uses_rate: it wants to know the learning rate.
    """

    spec: str
    exactness: str
    kind: Kind = Kind.GRADIENTS
    whole_tensors: bool = False
    half_types: bool = False
    hierarchical: bool = False
    checks_finite: bool = False
    uses_rate: bool = False

    def prepare(self, plan: BucketPlan) -> None:  # noqa: B027  # most need nothing
        """Learn of a plan, when it is made and whenever it changes (local).

        Raises:
            ValueError: it cannot exchange one of these parameters.
        """

    def begin(self, bucket: FilledBucket) -> None:  # noqa: B027  # gradients have no beginning
        """Learn the weights from which ranks part: at first, and after each exchange (local).

        For kind WEIGHTS; all buckets are shown. Copy what is to be kept.
        """

    def due(self, step: int) -> bool:
        """Return whether weights are exchanged after this step (the first is 0); equal on all."""
        return True

    @abstractmethod
    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        """Overwrite a bucket with the result, the same bits on all ranks (collective).

        Raises:
            AgreedError: all ranks meet this error here.
        """

    def end(self, info: StepInfo) -> None:  # noqa: B027  # most need nothing
        """Learn that all buckets of a step are reduced (local)."""

    def zeros(self, kinds: Sequence[tuple[int, DType]]) -> Zeros | None:
        """Return how a joined rank takes part in a step; None where it cannot.

        Args:
            kinds: for each bucket, and what follows them, number and type of the elements.
        """
        return None

    def state(self) -> ExchangeState:
        """Return copies of what it keeps from step to step (local)."""
        return ExchangeState()

    def load(self, state: ExchangeState) -> None:
        """Go on with what state() has returned, on the rank with this number (local).

        Raises:
            ValueError: it belongs to another exchange.
        """
        if state.shared or state.own:
            names = ", ".join(sorted({*state.shared, *state.own}))
            raise ValueError(f"exchange {self.spec!r} keeps nothing, but was given {names}")
