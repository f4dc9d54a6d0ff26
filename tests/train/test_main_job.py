"""The main job as README tells it: mpirun, a hostfile, python -m hvdtrain."""

from __future__ import annotations

import math
from pathlib import Path

from ranks import run_ranks
from run_files import summary_of

HOSTFILES = Path(__file__).resolve().parents[2] / "hostfiles"


def test_eight_ranks_of_a_local_hostfile(tmp_path: Path) -> None:
    """Eight slots, whatever the machine has: one job, which learns, and tells it once."""
    done = run_ranks(
        ["-m", "hvdtrain"],
        8,
        args=["--epochs", "1", "--out", tmp_path / "run"],
        hostfile=HOSTFILES / "localhost.openmpi",
        timeout_seconds=600,
    )
    summary = summary_of(tmp_path / "run")
    assert summary["world_size"] == 8
    assert summary["epochs"] == 1
    assert len(summary["weights_sha256"]) == 8
    assert len(set(summary["weights_sha256"])) == 1
    # An epoch is eleven steps of a warm-up here: better than guessing is all one can ask.
    assert summary["final"]["loss"] < math.log(10), done.stdout
    assert done.stdout.count("epoch 1/1") == 1
    (buckets,) = [line for line in done.stdout.splitlines() if line.startswith("  buckets ")]
    assert buckets.startswith("  buckets  1 for 149.5 KiB of gradients, at most ")
