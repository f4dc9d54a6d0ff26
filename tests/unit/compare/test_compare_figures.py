"""Contenders, their times and when they differ, and rows."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hvdtrain_bench.analysis.judge import WITHIN_THE_NOISE
from hvdtrain_bench.compare import meters
from hvdtrain_bench.compare.meters import Division, ExactDivision, PaddedDivision
from hvdtrain_bench.compare.page import ratio_text
from hvdtrain_bench.compare.rows import (
    Ratio,
    SampleCount,
    count_samples,
    make_rows,
    ratio_to,
    time_steps,
)
from hvdtrain_bench.compare.strategies import Need, parse_contenders
from hvdtrain_bench.compare.turns import Outcome, Turn, failure, largest_difference
from hvdtrain_bench.harness.jobs import JobEnd
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.cli.main import main
from hvdtrain.errors import UsageError


def test_commas_between_options_of_an_exchange() -> None:
    found = parse_contenders(["hvdtrain:nbit:bits=1,warmup=10,ddp,hvdtrain:sharded"], {}, "torch")
    names = [("hvdtrain", "nbit:bits=1,warmup=10"), ("ddp", ""), ("hvdtrain", "sharded")]
    assert [(one.strategy.name, one.variant) for one in found] == names


def test_a_missing_package_is_named_with_its_command() -> None:
    with pytest.raises(UsageError, match="no_such_module is not installed: pip install it"):
        Need("no_such_module.part", "pip install it").require()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--with", "none"], "--with 'none': no such strategy"),
        (["--with", "hvdtrain", "--python", "hvdtrain=/no/such"], "with the path of an interp"),
        (["--with", "ddp:fast"], "ddp has no variants"),
        (["--with", "hvdtrain", "--python", "ddp=/bin/sh"], "does not name ddp"),
        (["nothing"], "unknown recipe 'nothing'"),
        (["--framework", "keras", "--with", "ddp"], "no such strategy"),
        (["--repeats", "0"], "Invalid value for '--repeats'"),
    ],
)
def test_wrong_words_are_refused_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["compare", *words])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_cause_of_a_failure_in_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("all went well\nSegmentation fault\n-----\n\n")

    def said(processes: int, end: JobEnd) -> str:
        return failure(tmp_path, processes, end, log, 5)

    assert said(2, JobEnd(139)) == "it ended with exit code 139: Segmentation fault"
    meters.result_file(tmp_path, 0).touch()
    assert said(1, JobEnd(0)) == ""
    assert said(2, JobEnd(0)) == "rank 1 ended without a result: Segmentation fault"
    meters.write_error(tmp_path, 1, UsageError("torch is\nnot installed"))
    assert said(2, JobEnd(0, late=True)).startswith("it did not end within 5 s")
    assert said(2, JobEnd(1)) == "torch is not installed (rank 1 of 2)"
    meters.write_error(tmp_path, 1, ValueError("x"))
    assert meters.error_file(tmp_path, 1).read_text() == "ValueError: x"


def test_ratios_are_those_of_the_same_repeat() -> None:
    found = ratio_to(time_steps([[1.0], [2.0], [4.0]]), time_steps([[2.0], [2.0], [6.0]]))
    assert found == Ratio(1.5, 1.0, 2.0, (2.0, 1.0, 1.5))
    assert ratio_text(found) == "1.50 (1.00-2.00)"
    assert ratio_text(Ratio(2.0, 2.0, 2.0, (2.0,))) == "2.00"


def of(*parts: list[int]) -> list[np.ndarray]:
    return [np.array(part, np.int64) for part in parts]


def test_duplicates_and_losses() -> None:
    assert count_samples(of([0, 2], [1, 3]), 4) == SampleCount(4, 4, 0, 0)
    assert count_samples(of([0, 2, 0], [1, 0]), 4) == SampleCount(4, 5, 2, 1)
    assert count_samples(of([], []), 2) == SampleCount(2, 0, 0, 2)
    assert count_samples(of([0, 2, 0], [1, 0]), 4).text == "5, 2 twice, 1 never"
    assert count_samples(of([1], [0]), 2).text == "2"
    with pytest.raises(ValueError, match="from 0 to 1, got 2"):
        count_samples(of([0], [2]), 2)


@given(
    st.integers(1, 200),
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from([ExactDivision, PaddedDivision]),
)
def test_divisions(samples: int, size: int, each: int, kind: type) -> None:
    """All processes together take in each step what one process would take."""
    order = np.random.default_rng(samples).permutation(samples).astype(np.int64)
    ranks: list[Division] = [
        kind(meters.ProcessPlace(rank, size), size * each) for rank in range(size)
    ]
    shares = [rank.train_shares(order) for rank in ranks]
    alone = ExactDivision(meters.ProcessPlace(0, 1), size * each).train_shares(order)
    assert {len(share) for share in shares} == {len(alone)}
    for step, whole in enumerate(alone[:-1]):
        assert sorted(np.concatenate([share[step] for share in shares])) == sorted(whole)
    seen = count_samples([np.concatenate(share) for share in shares], samples)
    tested = count_samples([rank.test_share(samples) for rank in ranks], samples)
    padding = 0 if kind is ExactDivision else -samples % size
    assert (seen.lost, seen.duplicates) == (0, padding)
    assert (tested.lost, tested.duplicates) == (0, padding)


def test_the_largest_difference() -> None:
    one = {"a": np.array([1.0, 2.0]), "b": np.array([[3.0]])}
    other = {"a": np.array([1.0, 2.5]), "b": np.array([[2.75]])}
    assert largest_difference(one, other) == 0.5
    assert largest_difference(one, one) == 0
    assert math.isnan(largest_difference(one, {**other, "b": np.array([[np.nan]])}))
    with pytest.raises(ValueError, match="differ in b"):
        largest_difference(one, {**one, "b": np.zeros(2)})


def turn(seconds: float) -> Turn:
    """Return that of one process whose steps take so long."""
    result = meters.RankResult(
        library="library 1.0", samples=4, test_samples=3, threads=1,
        step_seconds=[9.0, seconds, seconds, seconds * 1.1], epoch_seconds=[4 * seconds],
        trained=[np.array([0, 2])], evaluated=np.array([0, 1]), scores={"loss": (4.0, 2.0)},
        checked_after=2, peak_memory_bytes=1000, socket_bytes_per_step=10.0,
        checked_weights={"a/b": np.array([1.0])},
    )  # fmt: skip
    return Turn((result,))


def test_a_difference_within_that_of_any_strategy_given_twice_is_noise() -> None:
    """The second ddp takes 1.25 of the time of the first, in each repeat."""
    contenders = parse_contenders(["hvdtrain,fsdp2,ddp,ddp"], {}, "torch")
    found = [
        Outcome(one, (turn(each),) * 3)
        for one, each in zip(contenders, [1.0, 1.2, 2.0, 2.5], strict=True)
    ]
    assert [row.verdict for row in make_rows(found[:3], 2)] == ["", "slower", "slower"]
    rows = make_rows(found, 2)
    assert [row.verdict for row in rows] == ["", WITHIN_THE_NOISE, "slower", "slower"]
    assert rows[3].notes == (
        "the same code took 1.25 to 1.25 of its own time: median ratios of 0.80 to 1.25 are noise",
    )
    assert [row.notes for row in rows[:3]] == [()] * 3
    # One that has failed says nothing of noise.
    failed = make_rows([*found[:2], replace(found[2], failure="gone"), found[3]], 2)
    assert [row.verdict for row in failed] == ["", "slower", "", "slower"]
