"""Ranks that are slow or stopped are not taken for dead."""

from __future__ import annotations

from pathlib import Path

import pytest
from killed_runs import survive


@pytest.mark.parametrize(
    "kills",
    [
        "1:13:forward:stop",
        *(
            pytest.param(kills, marks=pytest.mark.soak)
            for kills in (
                "0:13:backward:stop",
                "1:13:backward:hold",
                "0:9:update:hold",
                "0:1:checkpoint:stop",
                "0:1:evaluation:stop 1:1:evaluation:hold",
                "1:5:forward:stop 2:5:forward",  # the others wait for it in their recovery
            )
        ),
    ],
)
def test_a_rank_that_is_only_slow_stays(kills: str, tmp_path: Path) -> None:
    """Although the pause is longer than it takes to notice that a rank has ended."""
    survive(tmp_path, 3, kills)
