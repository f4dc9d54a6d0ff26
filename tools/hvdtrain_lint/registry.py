"""All rules, in the order of their codes."""

from __future__ import annotations

from hvdtrain_lint.rules import (
    barriers,
    collectives,
    device_count,
    downloads,
    epochs,
    evaluation,
    files,
    lengths,
    output,
    rates,
    results,
    seeds,
    starts,
    states,
)
from hvdtrain_lint.rules.rule import Rule

RULES: tuple[Rule, ...] = tuple(
    sorted(
        (
            *barriers.RULES,
            *collectives.RULES,
            *device_count.RULES,
            *downloads.RULES,
            *epochs.RULES,
            *evaluation.RULES,
            *files.RULES,
            *lengths.RULES,
            *output.RULES,
            *rates.RULES,
            *results.RULES,
            *seeds.RULES,
            *starts.RULES,
            *states.RULES,
        ),
        key=lambda rule: rule.code,
    )
)
