"""What differs between two ranks and must not, or does not differ and should. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hvdtrain_lint.rules.rule import Finding, Rule
from hvdtrain_lint.running.record import Operation, Record

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


def compare(path: str, first: Record, second: Record) -> list[Finding]:
    """Return what is wrong in the records of rank 0 and rank 1, at most one line for each rule."""
    differences = _differences(first, second)
    return sorted(rule.finding(path, line, what) for rule, line, what in differences)


def _differences(first: Record, second: Record) -> Iterator[tuple[Rule, int, str]]:
    pairs = list(enumerate(zip(first.steps, second.steps, strict=False), 1))
    for number, (one, other) in pairs:
        if one.weights != other.weights:
            yield _WEIGHTS, one.line, f"the weights of rank 0 and rank 1 differ after step {number}"
            break
    for number, (one, other) in pairs:
        if one.rates != other.rates:
            rates = f"{_numbers(one.rates)} and {_numbers(other.rates)}"
            yield _RATES, one.line, f"the rates of rank 0 and rank 1 are {rates} in step {number}"
            break
    samples = [(one.samples, other.samples) for _, (one, other) in pairs]
    if samples and all(one is not None and one == other for one, other in samples):
        count = len(samples)
        what = f"rank 0 and rank 1 had the same samples in {count} of {count} steps"
        yield _SAMPLES, first.steps[0].samples_line, what
    yield from _different_operations(first, second)


def _different_operations(first: Record, second: Record) -> Iterator[tuple[Rule, int, str]]:
    for number, (one, other) in enumerate(zip(first.steps, second.steps, strict=False), 1):
        found = _first_difference(one.operations, other.operations)
        if found:
            yield _OPERATIONS, found[0], f"before step {number}, {found[1]}"
            return
    # After the last step that both have taken, a rank may be ended before it comes as far.
    count = min(len(first.steps), len(second.steps))
    mine, theirs = _since(first, count), _since(second, count)
    if first.has_failed or second.has_failed:
        common = min(len(mine), len(theirs))
        mine, theirs = mine[:common], theirs[:common]
    found = _first_difference(mine, theirs)
    if found:
        yield _OPERATIONS, found[0], f"after step {count}, {found[1]}"


def _since(record: Record, count: int) -> list[Operation]:
    if len(record.steps) > count:
        return list(record.steps[count].operations)
    return record.rest


def _first_difference(
    one: Sequence[Operation], other: Sequence[Operation]
) -> tuple[int, str] | None:
    for mine, theirs in zip(one, other, strict=False):
        if (mine.name, mine.shape) != (theirs.name, theirs.shape):
            what = f"rank 0 calls {_written(mine)}, rank 1 {_written(theirs)} (line {theirs.line})"
            return mine.line, what
    if len(one) == len(other):
        return None
    rank, longer = (0, one) if len(one) > len(other) else (1, other)
    extra = longer[min(len(one), len(other))]
    return extra.line, f"rank {rank} calls {_written(extra)}, and rank {1 - rank} does not"


def _written(operation: Operation) -> str:
    return f"{operation.name}() of {operation.shape}" if operation.shape else f"{operation.name}()"


def _numbers(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)
