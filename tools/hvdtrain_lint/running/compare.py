"""What two ranks did, and what differs between them and must not, or does not and should. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from hvdtrain_lint.rules.rule import Finding, Rule

_WEIGHTS = Rule(
    "HVD901",
    "weights that differ between ranks after a step",
    "each rank trains a model of its own",
    "broadcast weights and optimizer state at the start, wrap the optimizer, and step on all ranks",
)
_SAMPLES = Rule(
    "HVD902",
    "the same samples on all ranks",
    "more ranks learn nothing more",
    "divide the data among the ranks, or seed with the rank",
)
_OPERATIONS = Rule(
    "HVD903",
    "different operations on different ranks",
    "ranks wait for one another forever, or mix up results",
    "call the same operations in the same order on all ranks",
)
_RATES = Rule(
    "HVD904",
    "learning rates that differ between ranks",
    "ranks take different steps",
    "step the scheduler on all ranks, with values that all ranks have averaged",
)
RUN_RULES = (_WEIGHTS, _SAMPLES, _OPERATIONS, _RATES)


@dataclass(frozen=True)
class Operation:
    """A collective operation that a script called."""

    name: str
    shape: str
    line: int

    def __str__(self) -> str:
        return f"{self.name}() of {self.shape}" if self.shape else f"{self.name}()"


@dataclass(frozen=True)
class Step:
    """A step of an optimizer, and the operations since the one before it."""

    line: int
    weights: str
    rates: list[float]
    samples: str | None
    samples_line: int
    operations: list[Operation]


@dataclass
class Record:
    """What one rank did."""

    steps: list[Step] = field(default_factory=list)
    rest: list[Operation] = field(default_factory=list)
    has_failed: bool = False


def read_record(lines: Iterable[str]) -> Record:
    """Return what the lines say that a rank has written; the last one may be cut off."""
    record = Record()
    for line in lines:
        try:
            event: dict[str, Any] = json.loads(line)
        except ValueError:
            break
        kind = event.pop("event")
        if kind == "operation":
            record.rest.append(Operation(**event))
        elif kind == "step":
            record.steps.append(Step(**event, operations=record.rest))
            record.rest = []
        else:
            record.has_failed = True
    return record


def compare(path: str, first: Record, second: Record) -> list[Finding]:
    """Return what is wrong in the records of rank 0 and rank 1, at most one line for each rule."""
    found: dict[Rule, Finding] = {}
    for rule, line, what in _differences(first, second):
        found.setdefault(rule, rule.finding(path, line, what))
    return sorted(found.values())


def _differences(first: Record, second: Record) -> Iterator[tuple[Rule, int, str]]:
    """Yield the differences between the ranks, the first one of a rule first."""
    ranks = "of rank 0 and rank 1"
    pairs = list(zip(first.steps, second.steps, strict=False))
    for number, (one, other) in enumerate(pairs, 1):
        if one.weights != other.weights:
            yield _WEIGHTS, one.line, f"the weights {ranks} differ after step {number}"
        if one.rates != other.rates:
            rates = " and ".join(", ".join(f"{r:g}" for r in s.rates) for s in (one, other))
            yield _RATES, one.line, f"the rates {ranks} are {rates} in step {number}"
        if difference := _first_difference(one.operations, other.operations):
            yield _OPERATIONS, difference[0], f"before step {number}, {difference[1]}"
    count = len(pairs)
    if pairs and all(one.samples is not None and one.samples == o.samples for one, o in pairs):
        what = f"rank 0 and rank 1 had the same samples in {count} of {count} steps"
        yield _SAMPLES, first.steps[0].samples_line, what
    # After the last step that both have taken, a rank may be ended before it comes as far.
    mine, theirs = (
        record.steps[count].operations if len(record.steps) > count else record.rest
        for record in (first, second)
    )
    if first.has_failed or second.has_failed:
        common = min(len(mine), len(theirs))
        mine, theirs = mine[:common], theirs[:common]
    if difference := _first_difference(mine, theirs):
        yield _OPERATIONS, difference[0], f"after step {count}, {difference[1]}"


def _first_difference(
    one: Sequence[Operation], other: Sequence[Operation]
) -> tuple[int, str] | None:
    for mine, theirs in zip_longest(one, other):
        if mine and theirs:
            if str(mine) != str(theirs):
                return mine.line, f"rank 0 calls {mine}, rank 1 {theirs} (line {theirs.line})"
        elif extra := mine or theirs:
            rank = 0 if mine else 1
            return extra.line, f"rank {rank} calls {extra}, and rank {1 - rank} does not"
    return None
