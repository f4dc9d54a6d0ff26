"""The exchanges by name, and exchanges from text such as "powersgd:rank=4"."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hvdtrain.core.exchanges.adasum import AdasumExchange
from hvdtrain.core.exchanges.auto import AutoExchange
from hvdtrain.core.exchanges.block_momentum import BlockMomentum
from hvdtrain.core.exchanges.diloco import DiLoCo
from hvdtrain.core.exchanges.half import HalfExchange
from hvdtrain.core.exchanges.local_sgd import LocalSGD, PostLocalSGD
from hvdtrain.core.exchanges.n_bit import NBitExchange
from hvdtrain.core.exchanges.power_sgd import PowerSGDExchange
from hvdtrain.core.exchanges.top_k import TopKExchange
from hvdtrain.core.exchanges.warm_up import WarmUp
from hvdtrain.core.gradients.exchange import (
    AllreduceExchange,
    Exchange,
    ExchangeOption,
    options_of,
    parse_exchange,
)

# The options in text are the arguments of these classes that are numbers, text or bool.
EXCHANGES: Mapping[str, type[Exchange]] = {
    "average": AllreduceExchange,
    "half": HalfExchange,
    "adasum": AdasumExchange,
    "nbit": NBitExchange,
    "powersgd": PowerSGDExchange,
    "topk": TopKExchange,
    "auto": AutoExchange,
    "local": LocalSGD,
    "postlocal": PostLocalSGD,
    "blockmomentum": BlockMomentum,
    "diloco": DiLoCo,
}
# Options of every exchange: steps, or samples of all ranks, of plain averages before it.
_WARM_UP, _SAMPLES = "warmup", "distributed_after"
_COMMON = {name: ExchangeOption(name, int, 0) for name in (_WARM_UP, _SAMPLES)}


def make_exchange(text: str) -> Exchange:
    """Return a new exchange that text describes, such as "powersgd:rank=4,warmup=10"."""
    kind, options = parse_exchange(text, EXCHANGES, _COMMON)
    steps, samples = int(options.pop(_WARM_UP, 0)), int(options.pop(_SAMPLES, 0))
    try:
        make: Callable[..., Exchange] = kind
        made = make(**options)
        return WarmUp(made, steps, samples) if steps or samples else made
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"exchange {text!r}: {error}") from None


def exchange_options(name: str) -> dict[str, ExchangeOption]:
    """Return the options that an exchange has in text, by name."""
    return options_of(EXCHANGES[name]) | _COMMON
