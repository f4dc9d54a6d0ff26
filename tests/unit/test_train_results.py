"""metrics.jsonl and summary.json hold exactly what they promise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from run_files import SUMMARY_FIELDS, epochs_of, metrics_of, summary_of

from hvdtrain.train.results import (
    Metrics,
    Score,
    Seconds,
    Summary,
    append_metrics,
    drop_metrics_after,
    write_summary,
)

LINE = Metrics(1, 45, "train", 0.5, 0.8, 0.02, 1000.0)
SUMMARY = Summary(
    world_size=2,
    hosts=1,
    host_names=["here"],
    engine="mpi",
    framework="torch",
    global_batch_size=32,
    base_lr=0.02,
    scaled_lr=0.04,
    epochs=3,
    final=Score(0.1, 0.98),
    samples=4311,
    samples_per_second=2000.0,
    seconds=Seconds(2.0, 1.5, 0.5),
    weights_sha256=["a", "a"],
)


def test_lines_are_added(tmp_path: Path) -> None:
    append_metrics(tmp_path, [LINE])
    append_metrics(tmp_path, [replace(LINE, epoch=2), replace(LINE, epoch=2, split="test")])
    assert epochs_of(tmp_path) == [(1, "train"), (2, "train"), (2, "test")]
    assert list(metrics_of(tmp_path)[0]) == [
        "epoch",
        "step",
        "split",
        "loss",
        "accuracy",
        "lr",
        "samples_per_second",
    ]


def test_lines_after_the_checkpoint_and_torn_lines_are_dropped(tmp_path: Path) -> None:
    append_metrics(tmp_path, [replace(LINE, epoch=epoch) for epoch in (1, 2, 3)])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 1, "st')
    drop_metrics_after(tmp_path, 2)
    assert [line["epoch"] for line in metrics_of(tmp_path)] == [1, 2]


def test_without_metrics_there_is_nothing_to_drop(tmp_path: Path) -> None:
    drop_metrics_after(tmp_path, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_diverged_is_still_json(tmp_path: Path) -> None:
    append_metrics(tmp_path, [replace(LINE, loss=float("nan"))])
    assert metrics_of(tmp_path)[0]["loss"] is None


def test_summary(tmp_path: Path) -> None:
    write_summary(tmp_path, SUMMARY)
    write_summary(tmp_path, replace(SUMMARY, epochs=4))
    written = summary_of(tmp_path)
    assert list(written) == SUMMARY_FIELDS
    assert written["epochs"] == 4
    assert written["final"] == {"loss": 0.1, "accuracy": 0.98}
    assert written["seconds"] == {"total": 2.0, "compute": 1.5, "communicate": 0.5}
    assert written["weights_sha256"] == ["a", "a"]
