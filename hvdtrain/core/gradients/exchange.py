"""How ranks combine their filled buckets: the interface, its options, and the average or sum."""

from __future__ import annotations

import inspect
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, TypedDict, get_args, get_type_hints

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.agreement.operation import Zeros
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.plan import Bucket, BucketPlan, ParameterSpec
from hvdtrain.core.gradients.step_info import LocalSteps, StepInfo
from hvdtrain.types import DType, ReduceOp

if TYPE_CHECKING:  # of exchanges that have arithmetic of their own
    from hvdtrain.arrays import Array, HostArray
    from hvdtrain.core.places import PlacedBucket

__all__ = [
    "AllreduceExchange",
    "Exchange",
    "ExchangeOption",
    "ExchangeState",
    "FilledBucket",
    "InnerState",
    "Kind",
    "LocalSteps",
    "Option",
    "ParameterSlice",
    "ParameterView",
    "SavedExchange",
    "StepInfo",
    "options_of",
    "parse_exchange",
    "parse_inner_state",
    "parse_options",
]


@dataclass(frozen=True)
class ParameterView:
    """A parameter's elements in a bucket.

    Attributes:
        name: name of the parameter.
        index: index of the parameter in the plan.
        start: its first element in the bucket.
        count: number of its elements.
        array: view of the elements in the shape of the parameter.
    """

    name: str
    index: int
    start: int
    count: int
    array: Array


@dataclass(frozen=True)
class ParameterSlice:
    """Contiguous elements of one parameter.

    Attributes:
        name: name of the parameter.
        index: index of the parameter in the plan.
        first: position of the first of them among the parameter's elements.
        count: number of elements of the whole parameter.
        elements: view of the elements, 1-d.
    """

    name: str
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
        filled_at: when the program had filled it (time.perf_counter); on a device, when it had
            queued that.
        placed: the bucket, if some of its gradients may lie elsewhere.
    """

    number: int
    buffer: Buffer
    layout: Bucket = field(repr=False)
    specs: Sequence[ParameterSpec] = field(repr=False)
    filled_at: float = field(default=0.0, repr=False)
    placed: PlacedBucket | None = field(default=None, repr=False)

    @cached_property
    def elements(self) -> Array:
        """View of all elements, 1-d."""
        from hvdtrain.arrays import elements_of

        return elements_of(self.buffer)

    @cached_property
    def parts(self) -> list[ParameterView]:
        """Views of the parameters' elements, in the shapes of the parameters."""
        from hvdtrain.arrays import strided

        parts = []
        for index, start in zip(self.layout.parameters, self.layout.starts, strict=True):
            spec = self.specs[index]
            array = strided(self.elements, start, spec.count, spec.shape, spec.strides)
            parts.append(ParameterView(spec.name, index, start, spec.count, array))
        return parts

    def section(self, first: int, last: int) -> FilledBucket:
        """Return some neighboring parameters as a bucket of its own, which shares its memory.

        Args:
            first, last: numbers of the first and the last parameter in the bucket.
        """
        layout, parts = self.layout, slice(first, last + 1)
        starts = layout.starts[parts]
        count = starts[-1] + self.specs[layout.parameters[last]].count - starts[0]
        section = Bucket(
            layout.parameters[parts],
            tuple(start - starts[0] for start in starts),
            count,
            layout.dtype,
            layout.device,
        )
        buffer = self.buffer.slice(starts[0], count)
        return FilledBucket(self.number, buffer, section, self.specs, self.filled_at)

    def pieces(self, elements: Array, start: int) -> list[ParameterSlice]:
        """Split a slice of the bucket at the bounds of its parameters.

        Args:
            elements: elements of the slice, 1-d.
            start: position of the slice in the bucket.
        """
        end = start + elements.shape[0]
        pieces = []
        for index, begin in zip(self.layout.parameters, self.layout.starts, strict=True):
            spec = self.specs[index]
            low, high = max(start, begin), min(end, begin + spec.count)
            if low < high:
                view = elements[low - start : high - start]
                pieces.append(ParameterSlice(spec.name, index, low - begin, spec.count, view))
        return pieces


class InnerState(Enum):
    """What becomes of the state of each rank's own optimizer after an exchange of weights."""

    KEEP = "keep"
    AVERAGE = "average"
    RESET = "reset"


def parse_inner_state(text: str) -> InnerState:
    """Return the member that the option `state` names."""
    try:
        return InnerState(text)
    except ValueError:
        names = ", ".join(each.value for each in InnerState)
        raise ValueError(f"state must be one of {names}, got {text}") from None


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
        in_warm_up: whether it takes plain averages now, before its own algorithm.
        partial: whether an exchange of weights that is due leaves some parameters as they are,
            so that only a flush makes the weights equal.
        looks_ahead: whether ranks continue from other weights than the model's, to which a flush
            returns even if no rank has taken a step.
        first: exchange of gradients that is used instead of an exchange of weights until this is
            None; `due` or `load` may change it.
        in_place: whether it reduces gradients that lie outside their buckets, too.
        at_once: whether buckets are launched together when all gradients are ready, because nothing
            is gained by reducing some earlier.
        stateless: whether it keeps nothing from step to step, so that it can reduce any gradients.
        on_one_node: what it does on a single node, if that is not what its spec says.
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
    on_one_node: str = ""

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
        """Restore a state that state() returned on this rank (local).

        On another number of ranks it has no arrays in `own`, and each rank starts over.

        Raises:
            ValueError: the state belongs to another exchange.
        """
        if state.shared or state.own:
            names = ", ".join(sorted({*state.shared, *state.own}))
            raise ValueError(f"exchange {self.spec!r} keeps nothing, but was given {names}")


# Counts of the optimizer beside the state of its exchange: mean number of samples of all ranks in a
# step, and number of steps before its own state was reset.
SAMPLES_PER_STEP, FORGOTTEN_STEPS = "samples per step", "forgotten steps"


class SavedExchange(TypedDict):
    """The state of an exchange on one rank, as plain data.

    Attributes:
        spec: description of the exchange.
        steps: number of steps that the program has completed.
        ranks: number of ranks that take part.
        shared: arrays that are equal on all ranks, and counts of the optimizer, by name.
        own: arrays of this rank, by name.
    """

    spec: str
    steps: int
    ranks: int
    shared: dict[str, HostArray]
    own: dict[str, HostArray]


Option = bool | int | float | str
_KINDS = (bool, int, float, str)


@dataclass(frozen=True)
class ExchangeOption:
    """An option of an exchange in text.

    Attributes:
        name: name, as in "powersgd:rank=4".
        kind: bool, int, float or str.
        default: value without it; None if there is none.
        required: whether it must be given.
    """

    name: str
    kind: type[Option]
    default: Option | None
    required: bool = False


def options_of(made: type) -> dict[str, ExchangeOption]:
    """Return the arguments of a class that are numbers, text or bool, by name."""
    hints = get_type_hints(made.__init__)  # type: ignore[misc]
    options = {}
    for key, value in inspect.signature(made).parameters.items():
        required = value.default is value.empty
        kinds = [kind for kind in (hints[key], *get_args(hints[key])) if kind in _KINDS]
        if kinds:
            default = None if required else value.default
            options[key] = ExchangeOption(key, kinds[0], default, required)
    return options


def parse_exchange(
    text: str, known: Mapping[str, type[Exchange]], common: Mapping[str, ExchangeOption]
) -> tuple[type[Exchange], dict[str, Option]]:
    """Return the class that text names, and the options given for it."""
    name, _, given = text.partition(":")
    if name not in known:
        raise ValueError(f"exchange {text!r}: the name must be one of {', '.join(known)}")
    made = known[name]
    return made, parse_options(f"exchange {text!r}", given, {**options_of(made), **common})


def parse_options(label: str, given: str, known: Mapping[str, ExchangeOption]) -> dict[str, Option]:
    """Return the options in a text such as "rank=4,warmup=10"."""
    options: dict[str, Option] = {}
    for pair in filter(None, given.split(",")):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or key not in known:
            raise ValueError(
                f"{label}: options are key=value with one of {', '.join(known)}, got {pair!r}"
            )
        if key in options:
            raise ValueError(f"{label}: {key} is given twice")
        options[key] = _convert(label, known[key], value)
    needed = [key for key, option in known.items() if option.required]
    if lacking := [key for key in needed if key not in options]:
        raise ValueError(f"{label}: needs {', '.join(lacking)}=")
    return options


def _convert(label: str, option: ExchangeOption, value: str) -> Option:
    if option.kind is bool:
        if value.lower() not in ("true", "false"):
            raise ValueError(f"{label}: {option.name} must be true or false, got {value!r}")
        return value.lower() == "true"
    try:
        return option.kind(value)
    except ValueError:
        kind = {int: "a whole number", float: "a number"}[option.kind]
        raise ValueError(f"{label}: {option.name} must be {kind}, got {value!r}") from None


def check_count(name: str, number: int, least: int = 1) -> None:
    """Check that an argument is a whole number that is not too small."""
    try:
        operator.index(number)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {number!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")


def check_positive(name: str, number: float) -> None:
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be a positive number, got {number}")


def check_momentum(momentum: float) -> None:
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be at least 0 and less than 1, got {momentum}")


class AllreduceExchange(Exchange):
    """The average g = sum_r(c_r g_r) / sum_r(c_r) with the ranks' weights c_r, or the sum.

    Args:
        op: reduction, AVERAGE or SUM.
        predivide: divisor of gradients before the sum, by which the sum is multiplied again.

    Raises:
        ValueError: an argument is none of these, or predivide is not a positive number.
    """

    exactness = "The exact sum or average, but for the rounding of sums."
    half_types = True
    in_place = True
    stateless = True

    def __init__(self, op: ReduceOp = ReduceOp.AVERAGE, predivide: float = 1.0) -> None:
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ValueError(f"op must be Average or Sum, got {op}")
        check_positive("predivide", predivide)
        self.op, self._predivide = op, predivide
        self.takes_samples = op is ReduceOp.AVERAGE
        self.spec = f"allreduce:op={op.value},predivide={float(predivide)!r}"

    @classmethod
    def answering(cls, zeros: Zeros) -> AllreduceExchange:
        return cls(zeros.op, zeros.postscale)

    def factors(self, info: StepInfo) -> tuple[float, float]:
        """Return the factors of this rank's elements, before and after the sum (local)."""
        prescale, postscale = 1.0 / self._predivide, self._predivide
        if self.op is ReduceOp.AVERAGE:
            prescale, postscale = info.weigh(prescale), postscale / info.size
        return prescale, postscale

    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        prescale, postscale = self.factors(info)
        placed = bucket.placed
        if placed is not None and info.whole and info.placed:
            met = info.filled and not info.weighted
            placed.reduce(prescale, postscale, everywhere=True, met=met)
            return
        if placed is not None:  # a joined rank, for example, has buckets only
            placed.gather()
        communicators.all_ranks.allreduce(bucket.buffer, ReduceOp.SUM, prescale, postscale)
        if placed is not None:
            placed.scatter()

    def zeros(self, kinds: Sequence[tuple[int, DType]]) -> Zeros:
        return Zeros(tuple(kinds), self.op, postscale=self._predivide)
