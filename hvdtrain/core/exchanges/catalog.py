"""The exchanges by name, and exchanges from text such as "powersgd:rank=4"."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args, get_type_hints

from hvdtrain.core.exchanges.adasum import AdasumExchange
from hvdtrain.core.exchanges.allreduce import AllreduceExchange
from hvdtrain.core.exchanges.block_momentum import BlockMomentum
from hvdtrain.core.exchanges.diloco import DiLoCo
from hvdtrain.core.exchanges.half import HalfExchange
from hvdtrain.core.exchanges.local_sgd import LocalSGD
from hvdtrain.core.exchanges.n_bit import NBitExchange
from hvdtrain.core.exchanges.post_local_sgd import PostLocalSGD
from hvdtrain.core.exchanges.power_sgd import PowerSGDExchange
from hvdtrain.core.exchanges.top_k import TopKExchange
from hvdtrain.core.exchanges.warm_up import WarmUp
from hvdtrain.core.gradients.exchange import Exchange

__all__ = ["EXCHANGES", "ExchangeOption", "exchange_options", "make_exchange"]

# The options in text are the arguments of these classes that are numbers, text or bool.
EXCHANGES: Mapping[str, type[Exchange]] = {
    "average": AllreduceExchange,
    "half": HalfExchange,
    "adasum": AdasumExchange,
    "nbit": NBitExchange,
    "powersgd": PowerSGDExchange,
    "topk": TopKExchange,
    "local": LocalSGD,
    "postlocal": PostLocalSGD,
    "blockmomentum": BlockMomentum,
    "diloco": DiLoCo,
}
_KINDS = (bool, int, float, str)
# Options of every exchange: steps, or samples of all ranks, of plain averages before it.
_WARM_UP, _SAMPLES = "warmup", "distributed_after"

Option = bool | int | float | str


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


def make_exchange(text: str) -> Exchange:
    """Return a new exchange that text describes, such as "powersgd:rank=4,warmup=10".

    Args:
        text: a name, or a name, a colon and options, `key=value`, separated by commas.

    Raises:
        ValueError: no exchange has the name, or it does not have such an option or value.
    """
    name, _, given = text.partition(":")
    if name not in EXCHANGES:
        raise ValueError(f"exchange {text!r}: the name must be one of {', '.join(EXCHANGES)}")
    options = _parse(text, given, exchange_options(name))
    steps, samples = int(options.pop(_WARM_UP, 0)), int(options.pop(_SAMPLES, 0))
    try:
        make: Callable[..., Exchange] = EXCHANGES[name]
        made = make(**options)
        return WarmUp(made, steps, samples) if steps or samples else made
    except (TypeError, ValueError) as error:
        raise ValueError(f"exchange {text!r}: {error}") from None


def exchange_options(name: str) -> dict[str, ExchangeOption]:
    """Return the options that an exchange has in text, by name.

    Args:
        name: name of the exchange, in EXCHANGES.
    """
    made = EXCHANGES[name]
    hints = get_type_hints(made.__init__)
    options = {}
    for key, value in inspect.signature(made).parameters.items():
        required = value.default is value.empty
        kinds = [kind for kind in (hints[key], *get_args(hints[key])) if kind in _KINDS]
        if kinds:
            default = None if required else value.default
            options[key] = ExchangeOption(key, kinds[0], default, required)
    return options | {name: ExchangeOption(name, int, 0) for name in (_WARM_UP, _SAMPLES)}


def _parse(text: str, given: str, known: Mapping[str, ExchangeOption]) -> dict[str, Option]:
    """Return the options of a text; `given` is its part after the colon."""
    options: dict[str, Option] = {}
    for pair in filter(None, given.split(",")):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or key not in known:
            raise ValueError(
                f"exchange {text!r}: options are key=value with one of {', '.join(known)}, "
                f"got {pair!r}"
            )
        if key in options:
            raise ValueError(f"exchange {text!r}: {key} is given twice")
        options[key] = _convert(text, known[key], value)
    needed = [key for key, option in known.items() if option.required]
    if lacking := [key for key in needed if key not in options]:
        raise ValueError(f"exchange {text!r}: needs {', '.join(lacking)}=")
    return options


def _convert(text: str, option: ExchangeOption, value: str) -> Option:
    if option.kind is bool:
        if value.lower() not in ("true", "false"):
            raise ValueError(f"exchange {text!r}: {option.name} must be true or false, got {value}")
        return value.lower() == "true"
    try:
        return option.kind(value)
    except ValueError:
        kind = {int: "a whole number", float: "a number"}[option.kind]
        raise ValueError(f"exchange {text!r}: {option.name} must be {kind}, got {value}") from None
