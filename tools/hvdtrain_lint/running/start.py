"""Start a script on two ranks, and compare what they have recorded."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from hvdtrain.check.probe import ProbeError, finish
from hvdtrain.errors import UsageError
from hvdtrain.launch.launchers.request import without_allocation
from hvdtrain_lint.rules.rule import RULES, Finding, Rule
from hvdtrain_lint.source.script import parse_script

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


_TIMEOUT_SECONDS = 600.0
_RANK = re.compile(r"^\[rank \d+/\d+\] ")
_ERROR = re.compile(r"^[\w.]*(Error|Exception)\b")
# A rank that waits so long for the other one ends the job: then the facts say why.
_STALLS = {"HVDTRAIN_STALL_SECONDS": "10", "HVDTRAIN_STALL_SHUTDOWN_SECONDS": "30"}


def run_script(path: Path, steps: int) -> list[Finding]:
    """Run a script on two ranks until each has taken so many steps; return what went wrong."""
    script, _ = parse_script(path)
    if not script.uses_hvd or "torch" not in script.frameworks:
        raise UsageError(
            f"{path}: --run is for scripts that use hvdtrain.torch or horovod.torch: leave it out"
        )
    with tempfile.TemporaryDirectory(prefix="hvdtrain-lint-") as folder:
        trouble = _run(str(path), str(steps), folder)
        files = [Path(folder) / f"{rank}.jsonl" for rank in range(2)]
        facts = [read_facts(f.read_text().splitlines() if f.exists() else ()) for f in files]
    findings = compare(str(path), *facts)
    if not findings and not all(any(each.kind == "weights" for each in own) for own in facts):
        raise UsageError(f"{path}: no step was taken on two ranks: {trouble or 'see its options'}")
    if not findings and trouble:
        raise UsageError(f"{path}: it fails on two ranks: {trouble}")
    return findings


def _run(*arguments: str) -> str:
    """Run the job; return what it complained of, "" if it ended well."""
    rank = str(Path(__file__).with_name("rank.py"))
    start = [sys.executable, "-m", "hvdtrain", "run", "-np", "2", "--as-horovod"]
    environ = _STALLS | without_allocation(os.environ)  # other hosts do not have the folder
    try:
        done = finish([*start, "--", rank, *arguments], _TIMEOUT_SECONDS, environ=environ)
    except ProbeError as error:
        return str(error)
    if done.returncode == 0:
        return ""
    # The last of each rank. That which failed first is the cause: others may have been ended.
    errors: dict[str, str] = {}
    for line in done.stderr.splitlines():
        named = _RANK.match(line)
        text = _RANK.sub("", line)
        if _ERROR.match(text):
            errors[named[0] if named else ""] = text
    return next(iter(errors.values()), done.complaint)
