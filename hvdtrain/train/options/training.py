"""Options of a step: optimizer, schedule, precision, exchange of gradients; and of evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.core.gradients.exchange import Exchange, Kind
from hvdtrain.errors import UsageError
from hvdtrain.train.optimizers.schedule import OPTIMIZERS, SCALINGS, SCHEDULES, parse_milestones
from hvdtrain.train.options.declare import (
    OptionGroup,
    as_given,
    at_least,
    between_0_and_1,
    every,
    not_empty,
    not_negative,
    option,
    positive,
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


_ANY = object()
# Options that an exchange excludes: name, value (_ANY: any but the default), and the reason.
_NO_EXCHANGE = (
    ("virtual_shards", _ANY, "its sums over shards have an order of their own: leave one out"),
    ("shard_optimizer", True, "only averages can be shared: leave one out"),
)
_NO_WEIGHTS = (
    ("amp", "fp16", "ranks would have to agree on the loss scale in each step: take --amp bf16"),
    ("ema", _ANY, "ranks have different weights between two exchanges: leave one out"),
)


def require_exchange_takes(
    exchange: Exchange | None, values: Mapping[str, tuple[Any, Any]]
) -> None:
    """Check that options go with an exchange."""
    if exchange is None:
        return
    weights, name = exchange.kind is Kind.WEIGHTS, values["exchange"][0]
    for option_name, refused, reason in _NO_EXCHANGE + _NO_WEIGHTS * weights:
        value, default = values[option_name]
        if value == refused or (refused is _ANY and value != default):
            raise UsageError(
                f"{as_given(option_name, value)} does not go with --exchange {name}: {reason}"
            )


# Options that a parameter server does not have: name, values (empty: all but the default), reason.
_REFUSED: tuple[tuple[str, tuple[str | bool, ...], str], ...] = (
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


def require_strategy_has(strategy: str, values: Mapping[str, tuple[Any, Any]]) -> None:
    """Check that the strategy supports the options."""
    if strategy == ALLREDUCE:
        return
    for name, refused, reason in _REFUSED:
        value, default = values[name]
        if value in refused or (not refused and value != default):
            raise UsageError(
                f"{as_given(name, value)} does not go with --strategy {strategy}: {reason}"
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
