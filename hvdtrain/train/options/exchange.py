"""The option for the exchange: what ranks send one another in each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.core.gradients.exchange import Exchange, Kind
from hvdtrain.errors import UsageError
from hvdtrain.train.options.declare import OptionGroup, option

__all__ = ["ExchangeOptions", "require_exchange_takes"]

_DEFAULT = "average"


def _check_exchange(label: str, value: str) -> None:
    try:
        make_exchange(value)
    except ValueError as error:
        raise UsageError(f"{label} {str(error).removeprefix('exchange ')}") from None


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions(OptionGroup):
    """The option for the exchange: what ranks send one another in each step."""

    title = "Exchange"

    exchange: str = option(
        _DEFAULT,
        "What ranks send one another, see docs/exchanges.md; 'hvdtrain exchanges' lists them.",
        metavar="NAME[:KEY=VALUE,...]",
        check=_check_exchange,
    )

    def make_exchange(self) -> Exchange | None:
        """Return a new exchange; None for the plain average of gradients."""
        return None if self.exchange == _DEFAULT else make_exchange(self.exchange)


_ANY = object()
# Options that an exchange excludes: name, value (_ANY: any but the default), and the reason.
_NO_EXCHANGE = (
    ("virtual_shards", _ANY, "its sums over shards have an order of their own: leave one out"),
)
_NO_WEIGHTS = (
    ("amp", "fp16", "ranks would have to agree on the loss scale in each step: take --amp bf16"),
    ("ema", _ANY, "ranks have different weights between two exchanges: leave one out"),
)


def require_exchange_takes(
    exchange: Exchange | None, values: Mapping[str, tuple[Any, Any]]
) -> None:
    """Check that options go with an exchange.

    Args:
        exchange: exchange of the run; None for the plain average of gradients.
        values: value and default of each option by name.

    Raises:
        UsageError: one does not go with the exchange.
    """
    if exchange is None:
        return
    weights = exchange.kind is Kind.WEIGHTS
    name, (framework, _) = values["exchange"][0], values["framework"]
    if weights and framework != "torch":
        raise UsageError(
            f"--exchange {name} exchanges weights, which goes with --framework torch only, got "
            f"--framework {framework}"
        )
    for option_name, refused, reason in _NO_EXCHANGE + _NO_WEIGHTS * weights:
        value, default = values[option_name]
        if value == refused or (refused is _ANY and value != default):
            raise UsageError(
                f"--{option_name.replace('_', '-')} {value} does not go with --exchange {name}: "
                f"{reason}"
            )
