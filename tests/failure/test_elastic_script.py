"""A script with hvd.elastic goes on when ranks are killed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ranks import launch

WORKER = Path(__file__).parent / "elastic_worker.py"
SAMPLES, LAST_EPOCH = 24, 2


def survive(ranks: int, victims: list[int], in_reset: int = -1) -> list[dict[str, Any]]:
    """Run the script, and return what those report that are left."""
    words = [in_reset, *victims]
    with launch(WORKER, ranks, args=words, launcher_args=["--with-ft", "ulfm"]) as job:
        done = job.wait(300)
        if done.returncode != 0:
            job.fail(f"exit code {done.returncode}")
        job.assert_nothing_left()
        results = sorted(job.results_folder.glob("*.json"), key=lambda path: int(path.stem))
        assert [int(path.stem) for path in results] == [
            rank for rank in range(ranks) if rank not in (*victims, in_reset)
        ]
        return [json.loads(path.read_text())["payload"] for path in results]


def test_a_rank_is_killed_and_another_one_in_a_reset_callback() -> None:
    results = survive(4, [1], in_reset=2)
    assert [(r["rank"], r["size"]) for r in results] == [(0, 2), (1, 2)]
    assert [r["resets"] for r in results] == [[3, 2]] * 2
    # From the second epoch on, these two alone use each sample once, but for the step in between.
    last = Counter(
        sample
        for r in results
        for epoch, _, own in r["used"]
        if epoch == LAST_EPOCH
        for sample in own
    )
    assert last == Counter(range(SAMPLES))


@pytest.mark.soak
@pytest.mark.parametrize("victims", [[0], [2, 0]])
def test_ranks_are_killed(victims: list[int]) -> None:
    results = survive(4, victims)
    assert all(r["size"] == 4 - len(victims) for r in results)
