"""All options of a training run, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.core.gradients.exchange import Exchange
from hvdtrain.errors import UsageError
from hvdtrain.train.optimizers.schedule import scaled_lr
from hvdtrain.train.options.declare import as_given, declared, groups_of
from hvdtrain.train.options.running import (
    DataOptions,
    DeviceOptions,
    MonitoringOptions,
    SavingOptions,
    TaskOptions,
    TrackingOptions,
)
from hvdtrain.train.options.training import (
    EvaluationOptions,
    ExchangeOptions,
    OptimisationOptions,
    PrecisionOptions,
    ScheduleOptions,
    require_exchange_takes,
    require_strategy_has,
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


_ANY = object()
# Options of torch only: name, value (_ANY: any but the default), and the reason, if known.
_TORCH_ONLY: tuple[tuple[str, Any, str], ...] = (
    ("optimizer", "lars", ""),
    ("amp", "fp16", ""),
    ("accumulate", _ANY, ""),
    ("ema", _ANY, ""),
    ("compile", _ANY, "Keras compiles the step by itself"),
    ("workers", _ANY, ""),
    ("non_finite", "skip", ""),
    ("virtual_shards", _ANY, ""),
    ("engine", "nccl", "gradients of {framework} are reduced in host memory"),
)


def require_framework_has(framework: str, values: dict[str, tuple[Any, Any]]) -> None:
    """Check that the framework supports the options."""
    if framework == "torch":
        return
    for name, refused, reason in _TORCH_ONLY:
        value, default = values[name]
        if value == refused or (refused is _ANY and value != default):
            because = f": {reason.format(framework=framework)}" if reason else ""
            raise UsageError(
                f"{as_given(name, value)} goes with --framework torch only, got --framework "
                f"{framework}{because}"
            )
