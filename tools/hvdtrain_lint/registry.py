"""All rules, in the order of their codes."""

from __future__ import annotations

# Imported because their functions add themselves to the table.
from hvdtrain_lint.rules import communication, outcomes, samples, training  # noqa: F401
from hvdtrain_lint.rules.rule import TABLE, Rule

RULES: tuple[Rule, ...] = tuple(sorted(TABLE, key=lambda rule: rule.code))
