"""The number of steps after which an exchange has done everything that it does."""

from __future__ import annotations

import re

from hvdtrain.core.exchanges.catalog import exchange_options

SHARDED = "sharded"  # the average, by ranks that share the work of the optimizer

_STEPS = re.compile(r"[:,]\s*steps\s*=\s*(\d+)")


def period_of(exchange: str) -> int:
    """Return the number of steps from one exchange to the next; 1 for exchanges of gradients.

    Args:
        exchange: exchange as text, such as "local:steps=8", or SHARDED; blocks of samples count as
            one step.
    """
    if exchange == SHARDED:
        return 1
    if given := _STEPS.search(exchange):
        return int(given[1])
    option = exchange_options(exchange.partition(":")[0]).get("steps")
    return int(option.default or 1) if option else 1


def turn_steps(exchange: str, least: int) -> int:
    """Return the smallest number of whole periods of an exchange that has enough steps."""
    period = period_of(exchange)
    return -(-least // period) * period
