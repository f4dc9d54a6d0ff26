"""What two ranks did, and what differs between them and must not, or does not and should. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from hvdtrain_lint.rules.rule import RULES, Finding, Rule

_WEIGHTS, _SAMPLES, _OPERATIONS, _RATES = (RULES[f"HVD90{number}"] for number in range(1, 5))


class Fact(NamedTuple):
    """An operation, or the samples, rates or weights of a step, after so many steps before it."""

    kind: str
    step: int
    line: int
    what: str


def read_facts(lines: Iterable[str]) -> list[Fact]:
    """Return what the lines say that a rank has written; the last one may be cut off."""
    found = []
    for line in lines:
        try:
            found.append(Fact(*json.loads(line)))
        except ValueError:
            break
    return found


def compare(path: str, first: Sequence[Fact], second: Sequence[Fact]) -> list[Finding]:
    """Return what is wrong in the facts of rank 0 and rank 1, at most one line for each rule."""
    found: dict[Rule, Finding] = {}
    for rule, line, what in _differences(first, second):
        found.setdefault(rule, rule.finding(path, line, what))
    return sorted(found.values())


def _differences(first: Sequence[Fact], second: Sequence[Fact]) -> Iterator[tuple[Rule, int, str]]:
    """Yield the differences between the ranks, the first one of a rule first."""

    def of(kind: str) -> list[list[Fact]]:
        return [[each for each in facts if each.kind == kind] for facts in (first, second)]

    for one, other in zip(*of("weights"), strict=False):
        if one.what != other.what:
            what = f"the weights of rank 0 and rank 1 differ after step {one.step + 1}"
            yield _WEIGHTS, one.line, what
    for one, other in zip(*of("rates"), strict=False):
        if one.what != other.what:
            what = f"{one.what} and {other.what} in step {one.step + 1}"
            yield _RATES, one.line, f"the rates of rank 0 and rank 1 are {what}"
    samples = list(zip(*of("samples"), strict=False))
    count = len(samples)
    if samples and all(one.what and one.what == other.what for one, other in samples):
        what = f"rank 0 and rank 1 had the same samples in {count} of {count} steps"
        yield _SAMPLES, samples[0][0].line, what
    # After the last step that both have taken, a rank may be ended before it comes as far.
    has_failed = any(of("failure"))
    for mine, theirs in zip_longest(*of("operation")):
        fact = min((each for each in (mine, theirs) if each), key=lambda each: each.step)
        when = f"before step {fact.step + 1}" if fact.step < count else f"after step {count}"
        if mine and theirs and mine.step == theirs.step <= count:
            if mine.what != theirs.what:
                what = f"rank 0 calls {mine.what}, rank 1 {theirs.what} (line {theirs.line})"
                yield _OPERATIONS, mine.line, f"{when}, {what}"
        elif fact.step < count or (fact.step == count and not has_failed):
            rank = 0 if fact is mine else 1
            what = f"rank {rank} calls {fact.what}, and rank {1 - rank} does not"
            yield _OPERATIONS, fact.line, f"{when}, {what}"
