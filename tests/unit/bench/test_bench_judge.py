"""When benchmarks call a difference a difference, and what they say of measurements."""

from collections.abc import Sequence
from math import exp

import numpy as np
import pytest
from hvdtrain_bench.analysis import judge
from hvdtrain_bench.analysis.judge import Curve, compare_losses, efficiencies, is_trustworthy, rows
from hvdtrain_bench.elastic import kills
from hvdtrain_bench.elastic.notes import Note
from hvdtrain_bench.harness.results import Case, period_of, turn_steps
from hvdtrain_bench.harness.turns import in_turns
from scipy import stats  # type: ignore[import-untyped]


@pytest.mark.parametrize("count", judge.STUDENT)
def test_few_repeats_have_the_interval_of_students_t(count: int) -> None:
    logs = [0.3 + 0.1 * number for number in range(count)]
    interval = judge.ratio_interval([exp(one) for one in logs])
    expected = stats.t.interval(0.99, count - 1, np.mean(logs), stats.sem(logs))
    assert interval == pytest.approx([exp(one) for one in expected], rel=1e-3)


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ((9.0,), judge.TOO_FEW_REPEATS),
        ((9.0, 9.0), judge.TOO_FEW_REPEATS),
        ((9.0, 9.0, 9.0), "slower"),
        ((1.015,) * 3, judge.WITHIN_THE_NOISE),  # certain, but too small to matter
        ((1.03, 1.3, 1.9), judge.WITHIN_THE_NOISE),  # three that vary as much
        ((1.5, 1.5, 1.5, 1.5, 0.99), judge.WITHIN_THE_NOISE),
        ((0.5, 0.41, 0.63, 0.4, 0.55), "faster"),
        ((1.5,) * 11 + (0.2,), "slower"),  # one outlier of many
    ],
)
def test_what_repeats_say(ratios: Sequence[float], said: str) -> None:
    assert judge.compare([1.0] * len(ratios), ratios).verdict == said


def test_all_take_one_turn_in_each_repeat() -> None:
    """The first repeat has their own order, on which `compare` relies."""
    turns = list(in_turns("abcd", 20))
    orders = ["".join(name for number, name in turns if number == repeat) for repeat in range(20)]
    assert orders[0] == "abcd"
    assert {"".join(sorted(order)) for order in orders} == {"abcd"}
    assert {order[0] for order in orders} == set("abcd")
    assert list(in_turns("abcd", 20)) == turns  # as on any other rank


REPEATS = 9
NOISE = [1.01, 0.99, 1.02, 0.98, 1.0, 1.03, 0.97, 1.01, 0.99]


def measured(**factors: float) -> dict[str, list[float]]:
    """Return times of contenders: "A" takes a millisecond, the others that times a factor."""
    values = {"A": [1e-3 * (1 + 0.2 * number) for number in range(REPEATS)]}
    for name, factor in factors.items():
        pairs = zip(values["A"], NOISE, strict=True)
        values[name.replace("_", " ")] = [factor * value * noise for value, noise in pairs]
    return values


def case(**factors: float) -> Case:
    return Case("made", {"bytes": 8}, "seconds", measured(**factors), "A", "A again")


def test_what_the_same_code_shows_is_within_the_noise() -> None:
    made = case(A_again=1.2, B=1.15, C=1.5)
    assert not is_trustworthy(made)
    found = {row.name: row.verdict for row in rows(made)}
    assert found["A again"] == "DIFFERS FROM ITSELF"
    assert (found["B"], found["C"]) == ("within the noise", "slower")
    assert is_trustworthy(case(A_again=1.0))


def test_efficiencies_of_a_step() -> None:
    names = {"hvdtrain": 2.0, "one rank alone": 1.5, "one rank, whole batch": 3.0}
    values = {name: [value] * REPEATS for name, value in names.items()}
    made = Case("step", {}, "seconds", values | {"no communication": [1.8] * REPEATS}, "hvdtrain")
    assert list(efficiencies(made, 2)) == ["hvdtrain"]
    found = efficiencies(made, 2)["hvdtrain"]
    # 1.5 / 2; 3 / (2 * 2); 1.8 / 2
    assert (found.weak, found.strong, found.limit) == pytest.approx((0.75, 0.75, 0.9))
    assert efficiencies(case(A_again=1.0), 2) == {}


@pytest.mark.parametrize(
    ("exchange", "period", "of_at_least_ten"),
    [
        *(("average", 1, 10), ("nbit:bits=1", 1, 10), ("local:steps=8", 8, 16)),
        *(("local:state=reset,steps=5", 5, 10), ("postlocal:after=3,steps=4", 4, 12)),
        *(("blockmomentum:block=4096", 1, 10), ("diloco:rate=0.5", 500, 500)),
    ],
)
def test_turns_are_whole_periods(exchange: str, period: int, of_at_least_ten: int) -> None:
    assert period_of(exchange) == period
    assert turn_steps(exchange, 10) == of_at_least_ten


def curve(seconds: float, *losses: float) -> Curve:
    return [(10 * number, seconds * number, loss) for number, loss in enumerate(losses)]


def test_losses_are_compared_with_those_of_the_base() -> None:
    curves = {
        "average": [curve(2.0, 5.0, 3.0, 1.0), curve(2.0, 5.0, 3.0, 2.0)],
        "alike": [curve(1.0, 5.0, 4.0, 1.2), curve(1.0, 5.0, 4.0, 2.2)],
        "worse": [curve(4.0, 5.0, 4.0, 2.5), curve(4.0, 5.0, 4.0, 1.9)],
        "better": [curve(4.0, 5.0, 4.0, 0.5), curve(4.0, 5.0, 4.0, 1.0)],
    }
    shortest, found = compare_losses(curves, "average")
    assert shortest == 2.0
    assert [summary.name for summary in found] == list(curves)
    assert [summary.verdict for summary in found] == ["", "within the seeds", "higher", "lower"]
    assert [summary.mean for summary in found] == pytest.approx([1.5, 1.7, 2.2, 0.75])
    assert [summary.difference for summary in found] == pytest.approx([0.0, 0.2, 0.7, -0.75])
    assert [summary.equal_time for summary in found] == pytest.approx([3.0, 1.7, 4.5, 4.5])
    assert [summary.seconds for summary in found] == [4.0, 2.0, 8.0, 8.0]
    assert (found[1].low, found[1].high) == (1.2, 2.2)


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
    found = kills.failure_of({1: left, 2: victim}, 2.5, 6, STAGES, {1: 4})
    assert (found.seconds, found.next_seconds) == (1.0, 1.0)
    assert found.stages == pytest.approx({"noticing": 0.2, "agreeing": 0.2, "retaking": 0.6})
    assert found.step_seconds == pytest.approx(1.1)
    assert (found.again, found.twice, found.lost) == (0, 0, 0)


def test_samples_are_counted_twice_or_left_out() -> None:
    before = [world(0, 0), *step([0], 1.0), *step([1], 2.0)]
    found = kills.failure_of({1: before, 2: [world(1, 2), *step([1], 5.0)]}, 2.5, 3, {}, {})
    assert (found.again, found.twice, found.lost) == (0, 1, 1)


@pytest.mark.parametrize("after", [[], [world(1, 2), *step([2], 4.0)]])
def test_a_job_does_not_reach_its_end(after: list[Note]) -> None:
    before = [world(0, 0), *step([0], 1.0), *step([1], 2.0)]
    with pytest.raises(kills.UnfinishedJobError, match="did not go on to its end"):
        kills.failure_of({1: before, 2: after}, 2.5, 4, {}, {})
