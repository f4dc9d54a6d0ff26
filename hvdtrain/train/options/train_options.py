"""All options of a training run, checked before anything starts; those of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.core.gradients.exchange import Exchange, Kind
from hvdtrain.errors import UsageError
from hvdtrain.train.optimizers.schedule import (
    OPTIMIZERS,
    SCALINGS,
    SCHEDULES,
    parse_milestones,
    scaled_lr,
)
from hvdtrain.train.options.declare import (
    OptionGroup,
    as_given,
    at_least,
    between_0_and_1,
    declared,
    every,
    groups_of,
    not_empty,
    not_negative,
    option,
    positive,
)
from hvdtrain.train.options.running import (
    DataOptions,
    DeviceOptions,
    MonitoringOptions,
    SavingOptions,
    TaskOptions,
    TrackingOptions,
)
from hvdtrain.train.parameter_server.settings import ALLREDUCE, ParameterServer, parse_strategy

# Learning rates for one rank.
DEFAULT_LR = {"sgd": 0.02, "adam": 0.001, "adamw": 0.001, "lars": 1.0, "lamb": 0.002}
SGD_MOMENTUM = 0.9

_DEFAULT_LR_TEXT = ", ".join(f"{name} {value:g}" for name, value in DEFAULT_LR.items())
_WITH_MOMENTUM = ("sgd", "lars")
_OF_LAYERS = ("lars", "lamb")


@dataclass(frozen=True, kw_only=True)
class OptimisationOptions(OptionGroup):
    """Options of the optimizer."""

    title = "Optimization"

    optimizer: str = option("sgd", "Optimizer that updates the weights.", choices=OPTIMIZERS)
    lr: float | None = option(
        None, "Learning rate for one rank.", unset=_DEFAULT_LR_TEXT, check=positive
    )
    momentum: float = option(SGD_MOMENTUM, "Momentum of sgd and lars.", check=between_0_and_1)
    weight_decay: float | None = option(
        None,
        "Weight decay.",
        unset="adamw 0.01, else 0",
        check=not_negative,
    )
    clip_norm: float | None = option(
        None,
        "Maximum norm of the reduced gradient, to which larger ones are scaled.",
        check=positive,
    )
    ema: float | None = option(
        None,
        "Decay of a moving average of the weights, such as 0.999, which is evaluated and saved.",
        check=between_0_and_1,
    )

    shard_optimizer: bool | None = option(
        None,
        "Share the optimizer's work and state among the ranks of a node, see docs/sharded.md.",
        unset="where it changes no bit of the results",
    )

    def check(self) -> None:
        if self.momentum != SGD_MOMENTUM and self.optimizer not in _WITH_MOMENTUM:
            raise UsageError(
                f"--momentum goes with --optimizer {' or '.join(_WITH_MOMENTUM)} only, got "
                f"--optimizer {self.optimizer}"
            )
        if self.shard_optimizer and self.optimizer in _OF_LAYERS:
            raise UsageError(
                f"--shard-optimizer does not go with --optimizer {self.optimizer}, which needs the "
                "norms of whole layers"
            )

    @property
    def base_lr(self) -> float:
        """The learning rate for one rank."""
        return DEFAULT_LR[self.optimizer] if self.lr is None else self.lr


DTYPES = ("float32", "float64")
PRECISIONS = ("none", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions(OptionGroup):
    """Options for the types and the compilation of arithmetic."""

    title = "Precision"

    dtype: str = option("float32", "Data type of weights and arithmetic.", choices=DTYPES)
    amp: str = option(
        "none", "Mixed precision: the data type of matrix products.", choices=PRECISIONS
    )
    compile: str | None = option(
        None,
        "Compile the model with this backend of torch.compile, such as inductor.",
        metavar="BACKEND",
        check=not_empty,
    )

    def check(self) -> None:
        if self.amp != "none" and self.dtype != "float32":
            raise UsageError(f"--amp {self.amp} goes with --dtype float32 only, got {self.dtype}")


# The schedules that each option applies to.
_GO_WITH = {
    "milestones": ("step",),
    "decay": ("step",),
    "power": ("polynomial",),
    "final_lr": ("cosine", "polynomial"),
}


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(OptionGroup):
    """Options of the learning rate schedule."""

    title = "Learning rate over time"

    lr_scaling: str = option(
        "linear", "How the learning rate grows with the ranks.", choices=SCALINGS
    )
    warmup_epochs: float = option(
        5.0, "Epochs in which it rises from the rate for one rank.", check=not_negative
    )
    schedule: str = option("constant", "How it decays after the warm-up.", choices=SCHEDULES)
    milestones: str = option(
        "", "For step: the epochs after which it decays, such as 30,60,80.", metavar="E,F,..."
    )
    decay: float = option(0.1, "For step: its factor at each milestone.", check=positive)
    power: float = option(1.0, "For polynomial: the exponent; 1: a straight line.", check=positive)
    final_lr: float = option(
        0.0,
        "For cosine and polynomial: the final rate, not scaled by the ranks.",
        check=not_negative,
    )

    def check(self) -> None:
        for name, schedules in _GO_WITH.items():
            if (
                getattr(self, name) != getattr(ScheduleOptions, name)
                and self.schedule not in schedules
            ):
                raise UsageError(
                    f"--{name.replace('_', '-')} goes with --schedule {' or '.join(schedules)} "
                    f"only, got --schedule {self.schedule}"
                )
        if self.schedule == "step" and not parse_milestones(self.milestones):
            raise UsageError("--schedule step needs --milestones, the epochs, such as 30,60,80")


_DEFAULT = "average"


def _check_exchange(label: str, value: str) -> None:
    try:
        make_exchange(value)
    except ValueError as error:
        raise UsageError(f"{label} {str(error).removeprefix('exchange ')}") from None


def _check_strategy(label: str, value: str) -> None:
    parse_strategy(label, value)


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions(OptionGroup):
    """The options for what ranks send one another in each step, and which of them compute."""

    title = "Exchange"

    exchange: str = option(
        _DEFAULT,
        "How ranks combine gradients or weights, see docs/exchanges.md; 'hvdtrain exchanges' lists "
        "them.",
        metavar="NAME[:KEY=VALUE,...]",
        check=_check_exchange,
    )
    strategy: str = option(
        ALLREDUCE,
        "allreduce, or a parameter server such as ps:servers=1,mode=async, see "
        "docs/exchanges/parameter-server.md.",
        metavar="NAME[:KEY=VALUE,...]",
        check=_check_strategy,
    )

    def make_exchange(self) -> Exchange | None:
        """Return a new exchange; None for the plain average of gradients."""
        return None if self.exchange == _DEFAULT else make_exchange(self.exchange)

    @property
    def parameter_server(self) -> ParameterServer | None:
        """The settings of the parameter server; None: ranks all-reduce."""
        return parse_strategy("--strategy", self.strategy)

    def worker_count(self, size: int) -> int:
        """Return how many of `size` ranks compute gradients, at least 1."""
        server = self.parameter_server
        return size if server is None else max(1, size - server.servers)


# Options that go not with something: name, values (none: all but the default), and the reason.
_Refusals = tuple[tuple[str, tuple[str | bool, ...], str], ...]
_NO_EXCHANGE: _Refusals = (
    ("virtual_shards", (), "its sums over shards have an order of their own: leave one out"),
    ("shard_optimizer", (True,), "only averages can be shared: leave one out"),
)
_NO_WEIGHTS: _Refusals = (
    ("amp", ("fp16",), "ranks would have to agree on the loss scale in each step: take --amp bf16"),
    ("ema", (), "ranks have different weights between two exchanges: leave one out"),
)
_NO_SERVER: _Refusals = (
    ("exchange", (), "workers push whole gradients"),
    ("optimizer", ("lars", "lamb"), "servers hold parts of layers, and cannot compute their norms"),
    ("clip_norm", (), "no rank has the whole reduced gradient"),
    ("ema", (), "servers do not average weights"),
    ("amp", ("fp16",), "servers do not agree on a loss scale"),
    ("virtual_shards", (), "gradients are added in the order of arrival"),
    ("shard_optimizer", (True,), "servers share the work already"),
    ("non_finite", ("skip",), "servers do not agree on skipping a step"),
    ("engine", ("local", "gloo", "nccl", "horovod"), "only mpi has messages between two ranks"),
)
_TORCH_ONLY: _Refusals = (
    ("optimizer", ("lars",), ""),
    ("amp", ("fp16",), ""),
    ("accumulate", (), ""),
    ("ema", (), ""),
    ("compile", (), "Keras compiles the step by itself"),
    ("workers", (), ""),
    ("non_finite", ("skip",), ""),
    ("virtual_shards", (), ""),
    ("engine", ("nccl",), "gradients of {framework} are reduced in host memory"),
)


def _refuse(
    table: _Refusals, values: Mapping[str, tuple[Any, Any]], text: Callable[[str], str]
) -> None:
    """Refuse options in a table; the text gets the reason."""
    for name, refused, reason in table:
        value, default = values[name]
        if value in refused or (not refused and value != default):
            raise UsageError(f"{as_given(name, value)} {text(reason)}")


def require_exchange_takes(
    exchange: Exchange | None, values: Mapping[str, tuple[Any, Any]]
) -> None:
    """Check that options go with an exchange."""
    if exchange is not None:
        table = _NO_EXCHANGE + _NO_WEIGHTS * (exchange.kind is Kind.WEIGHTS)
        name = values["exchange"][0]
        _refuse(table, values, lambda reason: f"does not go with --exchange {name}: {reason}")


def require_strategy_has(strategy: str, values: Mapping[str, tuple[Any, Any]]) -> None:
    """Check that the strategy supports the options."""
    if strategy != ALLREDUCE:
        said = f"does not go with --strategy {strategy}"
        _refuse(_NO_SERVER, values, lambda reason: f"{said}: {reason}")


def require_framework_has(framework: str, values: Mapping[str, tuple[Any, Any]]) -> None:
    """Check that the framework supports the options."""
    if framework != "torch":
        said = f"goes with --framework torch only, got --framework {framework}"
        _refuse(
            _TORCH_ONLY,
            values,
            lambda reason: said + (f": {reason.format(framework=framework)}" if reason else ""),
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(OptionGroup):
    """Options for evaluations."""

    title = "Evaluation"

    evaluate_every: str = option(
        "1 epoch",
        "How often to evaluate on the test samples: '100 steps', '1 epoch'.",
        metavar="INTERVAL",
        check=every,
    )
    best: str = option(
        "loss",
        "Test metric that decides which checkpoint is the best.",
        metavar="METRIC",
        check=not_empty,
    )
    early_stop: int | None = option(
        None, "Stop after this many evaluations without a new best.", check=at_least(1)
    )


# The last base is the first group: dataclasses collect fields in that order.
@dataclass(frozen=True, kw_only=True)
class TrainOptions(
    DeviceOptions,
    TrackingOptions,
    MonitoringOptions,
    EvaluationOptions,
    SavingOptions,
    PrecisionOptions,
    ScheduleOptions,
    ExchangeOptions,
    OptimisationOptions,
    DataOptions,
    TaskOptions,
):
    """Options of one training run; the same on every rank.

    Each base class declares the options of one topic.
    """

    def __post_init__(self) -> None:
        for one in OPTIONS:
            one.require(getattr(self, one.name))
        for group in groups_of(TrainOptions):
            group.check(self)
        values = {one.name: (getattr(self, one.name), one.default) for one in OPTIONS}
        require_framework_has(self.framework, values)
        require_strategy_has(self.strategy, values)
        require_exchange_takes(self.make_exchange(), values)
        if self.shard_optimizer and self.virtual_shards is not None:
            raise UsageError(
                "--shard-optimizer and --virtual-shards exclude each other: one rank alone, which "
                "shares nothing, would not get the same bits"
            )

    def make_exchange(self) -> Exchange | None:
        """Return a new exchange; None for the plain average of gradients."""
        exchange = super().make_exchange()
        if exchange is not None and self.quiet:
            exchange.silence()
        return exchange

    def with_absolute_paths(self) -> TrainOptions:
        """Return the same options for a reader in another working directory."""
        location, data_dir = self.recipe_location, self.data_dir
        recipe = self.recipe
        if location.path is not None:
            recipe = f"{location.path.absolute()}:{location.function}"
        return replace(self, recipe=recipe, data_dir=data_dir and data_dir.absolute())

    def scaled_lr(self, size: int) -> float:
        """Return the learning rate for `size` ranks, reached after the warm-up.

        With virtual shards it is that of one rank, whatever the size; also with an asynchronous
        parameter server, where each update is a step on the samples of one rank.
        """
        server = self.parameter_server
        if self.virtual_shards is not None or (server is not None and server.is_async):
            return self.base_lr
        return scaled_lr(self.base_lr, self.worker_count(size), self.lr_scaling)

    def samples_per_step(self, size: int) -> int:
        """Return the global batch size for `size` ranks, all backward passes of a step included."""
        return super().samples_per_step(self.worker_count(size))


# In the order of docs/options.md.
OPTIONS = declared(TrainOptions)
