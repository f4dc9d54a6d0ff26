"""What `lint --run` finds in the records of two ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hvdtrain_lint.running.compare import RUN_RULES, compare
from hvdtrain_lint.running.record import read_record

Event = dict[str, Any]


def step(weights: str = "w", rate: float = 0.1, samples: str | None = "s") -> Event:
    """Return the event of a step in line 9, after the model was called in line 7."""
    event = {"event": "step", "line": 9, "weights": weights, "rates": [rate]}
    return event | {"samples": samples, "samples_line": 7}


def operation(name: str, line: int = 5, shape: str = "float32 [2]") -> Event:
    """Return the event of an operation."""
    return {"event": "operation", "name": name, "shape": shape, "line": line}


def found(first: list[Event], second: list[Event]) -> list[str]:
    """Return what is found, without how to mend it."""
    records = [read_record(json.dumps(event) for event in events) for events in (first, second)]
    return [str(each).partition(";")[0] for each in compare("a.py", *records)]


RIGHT = [operation("allreduce"), step(samples="0")], [operation("allreduce"), step(samples="1")]


def test_equal_ranks_with_different_samples_are_right() -> None:
    assert found(*RIGHT) == []
    assert found([], []) == []


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            [step("a", samples="0"), step("b", samples="1")],
            [step("a", samples="2"), step("c", samples="3")],
            "a.py:9: HVD901 the weights of rank 0 and rank 1 differ after step 2: ",
        ),
        (
            [step(samples="0"), step(samples="1")],
            [step(samples="0"), step(samples="1")],
            "a.py:7: HVD902 rank 0 and rank 1 had the same samples in 2 of 2 steps: ",
        ),
        (
            [operation("allreduce", 5), step(samples="0")],
            [operation("allgather", 6), step(samples="1")],
            "a.py:5: HVD903 before step 1, rank 0 calls allreduce() of float32 [2], "
            "rank 1 allgather() of float32 [2] (line 6): ",
        ),
        (
            [operation("allreduce", 5, "float32 [2]")],
            [operation("allreduce", 5, "float32 [3]")],
            "a.py:5: HVD903 after step 0, rank 0 calls allreduce() of float32 [2], "
            "rank 1 allreduce() of float32 [3] (line 5): ",
        ),
        (
            [step(samples="0")],
            [step(samples="1"), operation("barrier", 5, "")],
            "a.py:5: HVD903 after step 1, rank 1 calls barrier(), and rank 0 does not: ",
        ),
        (
            [step(samples="0", rate=0.1)],
            [step(samples="1", rate=0.05)],
            "a.py:9: HVD904 the rates of rank 0 and rank 1 are 0.1 and 0.05 in step 1: ",
        ),
    ],
)
def test_a_difference_is_found(first: list[Event], second: list[Event], words: str) -> None:
    (line,) = found(first, second)
    assert line.startswith(words)


def test_one_step_with_other_samples_is_enough() -> None:
    ends = [step(samples="0"), step(samples="1")], [step(samples="0"), step(samples="2")]
    assert found(*ends) == []
    assert found([step(samples=None)], [step(samples=None)]) == []


def test_a_rank_that_has_failed_may_have_come_less_far() -> None:
    done = [step(samples="0"), operation("allreduce")]
    assert found(done, [step(samples="1"), {"event": "failure"}]) == []
    (line,) = found(done, [step(samples="1"), operation("allgather"), {"event": "failure"}])
    assert "HVD903" in line


def test_a_record_may_be_cut_off() -> None:
    record = read_record([json.dumps(step()), '{"event": "ste'])
    assert len(record.steps) == 1


def test_codes_are_of_their_own() -> None:
    assert len({rule.code for rule in RUN_RULES}) == len(RUN_RULES)
    assert all(rule.code.startswith("HVD9") for rule in RUN_RULES)
