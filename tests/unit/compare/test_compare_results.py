"""Rows, tables and the page, from measurements that are given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import chromium, low_contrasts, open_page
from hvdtrain_compare.contenders import parse_contenders, reference
from hvdtrain_compare.figures import WITHIN_THE_NOISE
from hvdtrain_compare.protocol import RankResult
from hvdtrain_compare.results.page import write_page
from hvdtrain_compare.results.row import make_rows
from hvdtrain_compare.results.tables import time_cells
from hvdtrain_compare.turns import Difference, Outcome, Turn

ABOUT = {"recipe": "</title><b>", "ranks": 2, "date": "today"}


def result(rank: int, seconds: float, **changes: Any) -> RankResult:
    made = RankResult(
        library="library 1.0",
        samples=4,
        test_samples=3,
        threads=1,
        step_seconds=np.array([9.0, seconds, seconds, seconds * 1.1]),
        epoch_seconds=np.array([4 * seconds]),
        trained=[np.array([rank, rank + 2])],
        evaluated=np.array([0, 1] if rank == 0 else [2, 0]),
        scores={"loss": (4.0 - rank, 2.0)},
        checked_after=2,
        peak_memory_bytes=1000 + rank,
        socket_bytes_per_step=10.0 if rank == 0 else None,
        checked_weights={"a/b": np.array([1.0])},
    )
    return replace(made, **changes)


def outcomes() -> list[Outcome]:
    one, two, ddp = parse_contenders(["hvdtrain,hvdtrain,ddp"], {}, "torch")

    def turns(seconds: float) -> tuple[Turn, ...]:
        turn = Turn((result(0, seconds), result(1, seconds * 1.05)))
        return turn, turn, turn

    alone = Turn((result(0, 2.0, trained=[np.arange(4)], evaluated=np.arange(3)),))
    return [
        Outcome(one, turns(1.0), difference=Difference(1e-8, 2, 1e-3)),
        Outcome(two, turns(1.01), difference=Difference(0.0, 2, float("nan"))),
        Outcome(ddp, (), failure="ValueError: <no>"),
        Outcome(reference("torch"), (alone, alone, alone), difference=Difference(0.0, 2, 0.0)),
    ]


def test_rows() -> None:
    first, again, failed, alone = make_rows(outcomes(), 2)
    assert first.step is not None
    assert first.step.seconds == 1.05
    assert (first.ratio, first.verdict) == (None, "")
    assert first.trained is not None
    assert first.trained.exact
    assert first.evaluated is not None
    assert (first.evaluated.seen, first.evaluated.duplicates) == (4, 1)
    assert first.scores == {"loss": 1.75}
    assert (first.memory_bytes, first.socket_bytes, first.processes) == (1001, 10.0, 2)
    assert again.verdict == "same code, no difference"
    assert again.notes == (
        "the same code took 1.01 to 1.01 of its own time: ratios of 0.98 to 1.02 are noise",
    )
    assert (failed.step, failed.failure) == (None, "ValueError: <no>")
    assert (alone.processes, alone.lines, alone.verdict) == (1, 0, "slower")


def test_a_difference_within_that_of_any_strategy_given_twice_is_noise() -> None:
    """The second ddp takes 1.25 of the time of the first, in each repeat."""
    contenders = parse_contenders(["hvdtrain,fsdp2,ddp,ddp"], {}, "torch")
    seconds = [1.0, 1.2, 2.0, 2.5]
    found = [
        Outcome(one, (Turn((result(0, each),)),) * 3)
        for one, each in zip(contenders, seconds, strict=True)
    ]
    assert [row.verdict for row in make_rows(found[:3], 2)] == ["", "slower", "slower"]
    rows = make_rows(found, 2)
    assert [row.verdict for row in rows] == ["", WITHIN_THE_NOISE, "slower", "slower"]
    assert rows[3].notes == (
        "the same code took 1.25 to 1.25 of its own time: ratios of 0.80 to 1.25 are noise",
    )
    assert [row.notes for row in rows[:3]] == [()] * 3
    # One that has failed says nothing of noise.
    failed = make_rows([*found[:2], replace(found[2], failure="gone"), found[3]], 2)
    assert [row.verdict for row in failed] == ["", "slower", "", "slower"]


def test_without_the_first_contender_nothing_is_compared() -> None:
    found = outcomes()
    rows = make_rows([replace(found[0], failure="gone"), *found[1:]], 2)
    assert [row.ratio for row in rows] == [None] * 4
    assert rows[1].step is not None
    ran = [row for row in rows if not row.failure]
    assert [time_cells(row, rows[0])[3:5] for row in ran] == [["-", ""]] * 2


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    size = write_page(tmp_path / "compare.html", ABOUT, make_rows(outcomes(), 2))
    page = (tmp_path / "compare.html").read_text()
    assert size == len(page.encode())
    assert page.count("<svg") == 5
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert "<b>" not in page
    assert "ValueError: &lt;no&gt;" in page
    assert " style=" not in page  # the policy forbids them


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser(tmp_path: Path, scheme: str) -> None:
    write_page(tmp_path / "compare.html", ABOUT, make_rows(outcomes(), 2))
    with (
        chromium() as browser,
        open_page(browser, tmp_path / "compare.html", width=375, color_scheme=scheme) as opened,
    ):
        assert (opened.faults, opened.requests) == ([], [])
        assert low_contrasts(opened.page) == []
        wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        assert not opened.page.evaluate(wide)
        opened.page.get_by_text("ddp: 10 lines").click()
        assert opened.page.get_by_text("DistributedDataParallel(model)").is_visible()
