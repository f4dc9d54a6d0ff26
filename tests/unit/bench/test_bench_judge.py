"""What benchmarks say of made measurements."""

from __future__ import annotations

import pytest
from hvdtrain_bench.analysis.judge import efficiencies, figures, is_trustworthy, rows
from hvdtrain_bench.harness.results import Case, PeerFacts, Result

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


def result(kind: str, *cases: Case) -> Result:
    peers = [PeerFacts("A", "hvdtrain 1", 1, 7, "all 2, not bound")]
    return Result(kind, 2, 1, peers, {"Horovod": "not installed"}, list(cases))


def test_verdicts() -> None:
    found = {row.name: row.verdict for row in rows(case(A_again=1.0, B=2.0, C=0.5, D=1.01))}
    assert found == {
        "A": "",
        "A again": "same code, no difference",
        "B": "slower",
        "C": "faster",
        "D": "within the noise",
    }


def test_what_the_same_code_shows_is_within_the_noise() -> None:
    made = case(A_again=1.2, B=1.15, C=1.5)
    assert not is_trustworthy(made)
    found = {row.name: row.verdict for row in rows(made)}
    assert found["A again"] == "DIFFERS FROM ITSELF"
    assert (found["B"], found["C"]) == ("within the noise", "slower")
    assert is_trustworthy(case(A_again=1.0))


def test_too_few_repeats_are_named() -> None:
    few = Case("few", {"bytes": 8}, "seconds", {"A": [1.0, 1.0], "B": [9.0, 9.0]}, "A")
    assert [row.verdict for row in rows(few)] == ["", "too few repeats"]


def test_efficiencies_of_a_step() -> None:
    names = {"hvdtrain": 2.0, "one rank alone": 1.5, "one rank, whole batch": 3.0}
    values = {name: [value] * REPEATS for name, value in names.items()}
    made = Case("step", {}, "seconds", values | {"no communication": [1.8] * REPEATS}, "hvdtrain")
    assert list(efficiencies(made, 2)) == ["hvdtrain"]
    found = efficiencies(made, 2)["hvdtrain"]
    # 1.5 / 2; 3 / (2 * 2); 1.8 / 2
    assert (found.weak, found.strong, found.limit) == pytest.approx((0.75, 0.75, 0.9))
    assert efficiencies(case(A_again=1.0), 2) == {}


@pytest.mark.parametrize(("seconds", "met"), [(7e-6, True), (9e-6, False)])
def test_the_target_of_a_named_sum(seconds: float, met: bool) -> None:
    values = {
        "engine mpi": [1e-5] * REPEATS,
        "engine mpi again": [1e-5] * REPEATS,
        "hvd.allreduce": [seconds] * REPEATS,
        "Horovod allreduce": [1e-3] * REPEATS,
    }
    about = {"bytes": 1 << 10}
    made = Case("1 KiB", about, "seconds", values, "engine mpi", "engine mpi again")
    named, horovod = figures(result("collectives", made))
    assert named.number == pytest.approx(1e6 * seconds)
    assert (named.unit, named.met) == ("us", met)
    assert horovod.number == pytest.approx(1e-3 / seconds)
    assert horovod.label == "1 KiB: Horovod allreduce / hvd.allreduce"
