"""The weights of one rank come out in whatever memory the ranks of a node meet, on any nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hosts import AGENT_ARGS, require_hosts, write_hostfile
from ranks import run_ranks

WORKER = Path(__file__).with_name("memory_ways_worker.py")


@pytest.mark.parametrize(
    "slots", [[3], [2, 1], pytest.param([2, 1, 1], marks=pytest.mark.soak)], ids=str
)
def test_ranks_give_the_weights_of_one_rank(slots: list[int], tmp_path: Path) -> None:
    several: dict[str, Any] = {"warm": "torch"}
    if len(slots) > 1:
        require_hosts()
        several = {
            "hostfile": write_hostfile(tmp_path / "hosts", "openmpi", slots),
            "launcher_args": AGENT_ARGS["openmpi"],
        }
    done = run_ranks(WORKER, sum(slots), timeout_seconds=300, **several)
    for gaps in done.results:
        assert sorted(gaps) == ["0", "1", "numpy"]
        assert max(gaps.values()) < 1e-12, gaps
