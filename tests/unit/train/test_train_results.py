"""metrics.jsonl and summary.json hold exactly what they promise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from run_files import SUMMARY_FIELDS, epochs_of, metrics_of, summary_of

from hvdtrain.train.records.results import (
    METRICS,
    RANKS,
    STEPS,
    MetricsRecord,
    Seconds,
    Summary,
    append_lines,
    drop_lines_after,
    write_summary,
)

LINE = MetricsRecord(1, 45, "train", {"loss": 0.5, "accuracy": 0.8}, 0.02, 1000.0, 2.5)
SUMMARY = Summary(
    world_size=2,
    hosts=1,
    host_names=["here"],
    engine="mpi",
    framework="torch",
    exchange="average",
    global_batch_size=32,
    base_lr=0.02,
    scaled_lr=0.04,
    epochs=3,
    final={"loss": 0.1, "accuracy": 0.98},
    samples=4311,
    samples_per_second=2000.0,
    seconds=Seconds(2.0, 1.5, 0.5),
    weights_sha256=["a", "a"],
    steps=135,
    best={"name": "loss", "value": 0.09, "epoch": 2, "step": 90, "since": 1},
    ended="epochs",
)


def add(directory: Path, *lines: MetricsRecord) -> None:
    append_lines(directory, METRICS, [line.line() for line in lines])


def test_lines_are_added(tmp_path: Path) -> None:
    add(tmp_path, LINE)
    add(tmp_path, replace(LINE, epoch=2.0), replace(LINE, epoch=2.0, split="test"))
    assert epochs_of(tmp_path) == [(1, "train"), (2, "train"), (2, "test")]
    assert all(isinstance(line["epoch"], int) for line in metrics_of(tmp_path))
    assert list(metrics_of(tmp_path)[0]) == [
        "epoch",
        "step",
        "split",
        "loss",
        "accuracy",
        "lr",
        "samples_per_second",
        "seconds",
    ]


def test_within_an_epoch_it_is_a_fraction(tmp_path: Path) -> None:
    add(tmp_path, replace(LINE, epoch=1 + 1 / 3))
    assert metrics_of(tmp_path)[0]["epoch"] == 1.333333


def test_lines_after_the_checkpoint_and_torn_lines_are_dropped(tmp_path: Path) -> None:
    for name in (METRICS, STEPS, RANKS):
        append_lines(tmp_path, name, [{"step": step} for step in (45, 90, 91, 135)], sync=False)
        with open(tmp_path / name, "a") as file:
            file.write('{"step": 1, "ep')
    drop_lines_after(tmp_path, 90)
    for name in (METRICS, STEPS, RANKS):
        lines = (tmp_path / name).read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [45, 90]


def test_without_metrics_there_is_nothing_to_drop(tmp_path: Path) -> None:
    drop_lines_after(tmp_path, 2)
    assert list(tmp_path.iterdir()) == []


def test_what_diverged_is_still_json(tmp_path: Path) -> None:
    confusion = [[1.0, float("inf")], [0.0, 2.0]]
    add(tmp_path, replace(LINE, values={"loss": float("nan"), "confusion": confusion}))
    (line,) = metrics_of(tmp_path)
    assert line["loss"] is None
    assert line["confusion"] == [[1.0, None], [0.0, 2.0]]


def test_summary(tmp_path: Path) -> None:
    write_summary(tmp_path, SUMMARY)
    write_summary(tmp_path, replace(SUMMARY, epochs=4))
    written = summary_of(tmp_path)
    assert list(written) == SUMMARY_FIELDS
    assert written["epochs"] == 4
    assert written["final"] == {"loss": 0.1, "accuracy": 0.98}
    assert written["seconds"] == {"total": 2.0, "compute": 1.5, "communicate": 0.5}
    assert written["weights_sha256"] == ["a", "a"]
