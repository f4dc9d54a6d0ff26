"""Options for evaluations."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.train.options.checks import at_least, every, not_empty
from hvdtrain.train.options.declare import OptionGroup, option


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
