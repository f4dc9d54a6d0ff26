"""Runs whose ranks share the optimizer's work, in memory of the node and without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks
from run_files import summary_of

OPTIONS = ["--optimizer", "adam", "--ema", "0.9", "--watch-every", "1", "--shard-optimizer"]


def final_loss(out: Path, ranks: int, engine: str, epochs: int) -> float:
    """Train digits, from a checkpoint where there is one; return the loss at the end."""
    options = [*OPTIONS, "--engine", engine, "--checkpoint-every", "5 steps", "--resume", "auto"]
    args = ["train", "digits", "--epochs", str(epochs), "--out", out, *options]
    run_ranks(["-m", "hvdtrain"], ranks, args=args, timeout_seconds=300)
    summary = summary_of(out)
    assert summary["weights_sha256"] == [summary["weights_sha256"][0]] * ranks
    loss: float = summary["final"]["loss"]
    return loss


@pytest.mark.soak
def test_runs_go_on_with_other_ranks_and_another_memory(tmp_path: Path) -> None:
    """Slices end elsewhere, and torch's vector loops with them: the last bits may differ."""
    first = [final_loss(tmp_path / engine, 2, engine, 1) for engine in ("mpi", "gloo")]
    assert first[0] == pytest.approx(first[1], rel=1e-4)
    later = [final_loss(tmp_path / engine, 3, "gloo", 2) for engine in ("mpi", "gloo")]
    assert later[0] == pytest.approx(later[1], rel=1e-4)
    assert later[0] < first[0]
