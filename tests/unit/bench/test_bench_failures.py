"""What kills cost, from made notes of processes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hvdtrain_bench.analysis.kills import (
    NEW_STEP,
    UnfinishedJobError,
    failure_of,
    figures_of_kills,
    summary_of,
)
from hvdtrain_bench.harness.notes import Note
from hvdtrain_bench.harness.results import Case, Result

STAGES = {"noticed": "noticing", "agreed": "agreeing", "": "retaking"}


def world(generation: int, done: int | None) -> Note:
    return {"event": "world", "at": 0.0, "generation": generation, "done": done}


def step(samples: Sequence[int], ended: float | None) -> list[Note]:
    begun: Note = {"event": "begin", "at": 0.0, "samples": list(samples)}
    return [begun] if ended is None else [begun, {"event": "end", "at": ended}]


def at(event: str, seconds: float) -> Note:
    return {"event": event, "at": seconds}


def test_a_broken_step_is_taken_by_those_that_are_left() -> None:
    """The victim ends in its third step; the first rank is through with its own."""
    victim = [world(0, 0), *step([1], 1.0), *step([3], 2.0), *step([5], None)]
    left = [
        *(world(0, 0), *step([0], 1.1), *step([2], 2.2), *step([4], None)),
        *(at("noticed", 2.7), at("agreed", 2.9), world(1, None), *step([4, 5], 3.5)),
    ]
    found = failure_of({1: left, 2: victim}, 2.5, 6, STAGES, {1: 4})
    assert (found.seconds, found.next_seconds) == (1.0, 1.0)
    assert found.stages == pytest.approx({"noticing": 0.2, "agreeing": 0.2, "retaking": 0.6})
    assert found.step_seconds == pytest.approx(1.1)
    assert (found.again, found.twice, found.lost) == (0, 0, 0)


def test_steps_since_a_checkpoint_are_taken_again() -> None:
    before = [world(0, 0), *step([0], 1.0), *step([1], 2.0), *step([2], None)]
    after = [world(1, 1), *step([1], 5.0), *step([2], 6.0)]
    found = failure_of({1: before, 2: after}, 2.5, 3, {}, {})
    assert (found.next_seconds, found.seconds, found.stages) == (2.5, 3.5, {})
    assert (found.again, found.twice, found.lost) == (1, 0, 0)


def test_samples_are_counted_twice_or_left_out() -> None:
    before = [world(0, 0), *step([0], 1.0), *step([1], 2.0)]
    after = [world(1, 2), *step([1], 5.0)]
    found = failure_of({1: before, 2: after}, 2.5, 3, {}, {})
    assert (found.again, found.twice, found.lost) == (0, 1, 1)


def test_several_backward_passes_are_one_step() -> None:
    before = [world(0, 0), *step([0], 1.0), *step([1], 2.0)]
    after = [world(1, 2), *step([2], None), *step([3], 5.0)]
    found = failure_of({1: before, 2: after}, 2.5, 4, {}, {})
    assert (found.seconds, found.lost) == (2.5, 0)


@pytest.mark.parametrize("after", [[], [world(1, 2), *step([2], 4.0)]])
def test_a_job_does_not_reach_its_end(after: list[Note]) -> None:
    before = [world(0, 0), *step([0], 1.0), *step([1], 2.0)]
    with pytest.raises(UnfinishedJobError, match="did not go on to its end"):
        failure_of({1: before, 2: after}, 2.5, 4, {}, {})


def test_figures_of_kills() -> None:
    costs = {"again": 0, "twice": 0, "lost": 0}
    seconds = [float(n) for n in range(1, 41)]
    about = {"failures": [costs] * 40, "failed": ["it ended"], "needs": ""}
    cases = [Case(name, about, "seconds", {NEW_STEP: seconds}) for name in ("hvdtrain", "other")]
    summary = summary_of(cases[0])
    times = summary.times[NEW_STEP]
    assert (summary.survived, summary.kills) == (40, 41)
    assert (times.median, times.late, times.least, times.most) == (20.5, 38.0, 1.0, 40.0)
    usual, late = figures_of_kills(Result("kills", 3, 1, [], {}, cases))
    assert (usual.number, usual.met, late.number, late.met) == (20.5, False, 38.0, False)
