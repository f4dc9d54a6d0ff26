"""The exchange interface: how ranks combine their filled buckets."""

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
    """The contents of buckets."""

    GRADIENTS = "gradients"
    WEIGHTS = "weights"


@dataclass(frozen=True)
class StepInfo:
    """Information about a step.

    Attributes:
        step: number of steps that the program has completed before.
        size: number of ranks that take part.
        rate: learning rate, if the adapter knows it; only for an exchange with `uses_rate`.
        weight: weight of this rank in the average; 0 if it has joined.
        total: sum of the weights of all ranks.
        weighted: whether any rank was given a weight; otherwise the plain average is used.
        finite: whether the elements of all ranks are finite, known at the end of the step; only
            for an exchange with `checks_finite`.
    """

    step: int
    size: int
    rate: float | None = None
    weight: float = 1.0
    total: float = 0.0
    weighted: bool = False
    finite: bool = True

    def weigh(self, factor: float = 1.0) -> float:
        """Return `factor` times the weight of this rank's elements.

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
    """A parameter's elements in a bucket.

    Attributes:
        index: index of the parameter in the plan.
        start: its first element in the bucket.
        count: number of its elements.
        array: view of the elements in the shape of the parameter.
    """

    index: int
    start: int
    count: int
    array: Array


@dataclass(frozen=True)
class ParameterSlice:
    """Contiguous elements of one parameter.

    Attributes:
        index: index of the parameter in the plan.
        first: position of the first of them among the parameter's elements.
        count: number of elements of the whole parameter.
        elements: view of the elements, 1-d.
    """

    index: int
    first: int
    count: int
    elements: Array


@dataclass(frozen=True)
class FilledBucket:
    """A filled bucket and its layout.

    Attributes:
        number: number of the bucket in the plan.
        buffer: memory of the whole bucket.
        layout: positions of the parameters in the bucket.
        specs: parameters of the plan.
    """

    number: int
    buffer: Buffer
    layout: Bucket = field(repr=False)
    specs: Sequence[ParameterSpec] = field(repr=False)

    @cached_property
    def elements(self) -> Array:
        """View of all elements, 1-d."""
        return elements_of(self.buffer)

    @cached_property
    def parts(self) -> list[ParameterView]:
        """Views of the parameters' elements, in the shapes of the parameters."""
        parts = []
        for index, start in zip(self.layout.parameters, self.layout.starts, strict=True):
            spec = self.specs[index]
            array = strided(self.elements, start, spec.count, spec.shape, spec.strides)
            parts.append(ParameterView(index, start, spec.count, array))
        return parts

    def pieces(self, elements: Array, start: int) -> list[ParameterSlice]:
        """Split a slice of the bucket at the bounds of its parameters.

        Args:
            elements: elements of the slice, 1-d.
            start: position of the slice in the bucket.
        """
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
        checks_finite: whether `end` needs to know if all elements were finite.
        uses_rate: whether it needs the learning rate.
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
    stateless: bool = False

    def prepare(self, plan: BucketPlan) -> None:  # noqa: B027  # most need nothing
        """Prepare for a plan, when it is made and whenever it changes (local).

        Raises:
            ValueError: it cannot exchange one of these parameters.
        """

    def begin(self, bucket: FilledBucket) -> None:  # noqa: B027  # only for weights
        """Receive the weights that all ranks have in common (local).

        Called with every bucket at first and after each exchange, if the kind is WEIGHTS. The
        bucket is overwritten later, so copy what has to be kept.
        """

    def due(self, step: int) -> bool:
        """Return whether weights are exchanged after a step, counted from 0; equal on all ranks."""
        return True

    @abstractmethod
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

        Raises:
            ValueError: the state belongs to another exchange.
        """
        if state.shared or state.own:
            names = ", ".join(sorted({*state.shared, *state.own}))
            raise ValueError(f"exchange {self.spec!r} keeps nothing, but was given {names}")
