"""Options for what is monitored and printed while training."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.train.options.checks import at_least
from hvdtrain.train.options.declare import OptionGroup, option

NON_FINITE = ("stop", "skip")


@dataclass(frozen=True, kw_only=True)
class MonitoringOptions(OptionGroup):
    """Options for what is monitored and printed while training."""

    title = "Watching"

    log_every: int | None = option(
        None,
        "Steps between two lines of steps.jsonl.",
        unset="torch 50, else once an epoch",
        check=at_least(1),
    )
    watch_every: int | None = option(
        None,
        "Steps between two comparisons of all ranks' weights; 0: never.",
        unset="torch 100, else once an epoch",
        check=at_least(0),
    )
    non_finite: str = option(
        "stop", "What to do if a loss or gradient is not finite.", choices=NON_FINITE
    )
    quiet: bool = option(False, "Print nothing but errors.")
