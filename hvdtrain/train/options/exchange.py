"""The options for what ranks send one another in each step, and which of them compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.core.gradients.exchange import Exchange, Kind
from hvdtrain.errors import UsageError
from hvdtrain.train.options.declare import OptionGroup, as_given, option
from hvdtrain.train.parameter_server.settings import (
    ALLREDUCE,
    ParameterServer,
    parse_strategy,
)

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
