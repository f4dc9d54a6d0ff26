"""What a person reads, and whether there is a terminal to read it on."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.train.messages import (
    closing_lines,
    decay_text,
    device_text,
    epoch_lines,
    failure_tags,
    values_text,
)
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.records.results import MetricsRecord, RanksJoined, RanksLost, Seconds, Summary
from hvdtrain.train.terminal import Terminal, on_terminal

TRAIN = MetricsRecord(3, 135, "train", {"loss": 0.5, "accuracy": 0.8}, 0.02, 1000.0, 9.0)
TEST = MetricsRecord(3, 135, "test", {"loss": 0.25, "accuracy": 0.9}, 0.02, 5000.0, 9.5)


def summary(digests: list[str]) -> Summary:
    return Summary(
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
        final={"loss": 0.1, "accuracy": 0.9861},
        samples=4311,
        samples_per_second=2155.5,
        seconds=Seconds(2.0, 1.5, 0.5),
        weights_sha256=digests,
        steps=135,
        best=None,
        ended="epochs",
    )


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        (["cpu"], "cpu"),
        (["cpu", "cpu"], "cpu on every rank"),
        (["cuda:0", "cuda:1"], "rank 0: cuda:0; rank 1: cuda:1"),
        (["cuda:0", "cpu", "cpu"], "rank 0: cuda:0; ranks 1, 2: cpu"),
    ],
)
def test_devices(devices: list[str], text: str) -> None:
    assert device_text(devices) == text


@pytest.mark.parametrize(
    ("schedule", "warmup", "text"),
    [
        ("constant", 5, ""),
        ("cosine", 0, ", cosine"),
        ("cosine", 2, ", cosine from epoch 2 on"),
        ("step", 2, ", step after epochs 3,6"),
        ("cosine", 9, ", no cosine: the warm-up (9 epochs) takes the whole run"),
    ],
)
def test_how_the_rate_falls(schedule: str, warmup: float, text: str) -> None:
    milestones = "3,6" if schedule == "step" else ""
    options = TrainOptions(epochs=9, schedule=schedule, warmup_epochs=warmup, milestones=milestones)
    assert decay_text(options, options.warmup_epochs) == text


def test_epoch_line() -> None:
    (line,) = epoch_lines([TRAIN, TEST], 12)
    assert line == (
        "epoch  3/12  train loss 0.5000, accuracy 80.00%  test loss 0.2500, accuracy 90.00%  "
        "lr 0.02  1000 samples/s"
    )


def test_an_evaluation_within_an_epoch() -> None:
    (line,) = epoch_lines([replace(TEST, epoch=2.34567)], 9)
    assert line.startswith("epoch 2.35/9  test loss 0.2500")
    assert "train" not in line


def test_what_is_no_number_is_not_printed() -> None:
    values: dict[str, Any] = {"loss": 0.5, "confusion": [[1.0, 0.0], [0.0, 1.0]], "top_5": 0.75}
    assert values_text(values) == "loss 0.5000, top_5 0.7500"


def test_closing_lines() -> None:
    text = "\n".join(closing_lines(summary(["ab", "ab"]), "runs/x", ["summary.json"]))
    for part in ("98.61%", "2156 samples/s", "computing 1.5 s", "communicating 0.5 s", "runs/x"):
        assert part in text
    assert text.startswith("test accuracy 98.61%, loss 0.1000 after 3 epochs\n")
    assert "WARNING" not in text
    assert "WARNING" in "\n".join(closing_lines(summary(["ab", "cd"]), "runs/x", []))


def test_closing_lines_without_test_samples_and_before_the_end() -> None:
    best = {"name": "loss", "value": 0.25, "epoch": 1, "step": 45, "since": 2}
    early = replace(summary(["ab"]), final={}, ended="early stop", best=best)
    first, *_ = closing_lines(early, "runs/x", [])
    assert first == "after 3 epochs, no better than loss 0.2500 after 1 epoch"


def test_only_the_rank_that_speaks_prints(capsys: pytest.CaptureFixture[str]) -> None:
    for speaks in (True, False):
        with Terminal(speaks, bar=False) as terminal:
            terminal.begin("epoch 1/1", 2)
            terminal.advance()
            terminal.print([f"speaks {speaks}"])
    assert capsys.readouterr().out == "speaks True\n"


def test_bar_is_shown_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setenv("TERM", "xterm")
    with Terminal(True, bar=True) as terminal:
        terminal.begin("epoch 1/1", 2)
        terminal.advance()
        terminal.print(["a line with [brackets]"])
    assert "epoch 1/1" in shown.getvalue()
    assert "\x1b[?25l" not in shown.getvalue()  # never hides the cursor
    assert "a line with [brackets]" in shown.getvalue()


def test_mpirun_passes_on_all_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps a line back until its newline comes."""
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setenv("TERM", "xterm")
    with Terminal(True, bar=True) as terminal:
        terminal.begin("epoch 1/2", 2)
        terminal.show_training(TRAIN)
        terminal.begin("epoch 2/2", 2)  # draws at once
        values = "1000 samples/s  lr 0.02  loss 0.5000, accuracy 80.00%\n"
        assert shown.getvalue().endswith(values), shown.getvalue()
        terminal.end(["the last line"])
        assert "epoch 2/2" not in shown.getvalue().rpartition("\x1b[2K")[2]
        assert shown.getvalue().endswith("\x1b[2Kthe last line\n")


def test_a_pipe_is_no_terminal() -> None:
    script = "from hvdtrain.train.terminal import on_terminal; print(on_terminal())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "False\n"


def test_below_a_launcher_its_output_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours, theirs = os.openpty()
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        for name in [name for name in os.environ if name.startswith(("OMPI_", "PM", "SLURM_"))]:
            monkeypatch.delenv(name)
        assert on_terminal()
        monkeypatch.setenv("PMI_RANK", "0")
        monkeypatch.setenv("PMI_SIZE", "2")
        for shown, expected in (("/dev/pts/3", True), ("pipe:[17]", False)):
            monkeypatch.setattr(os, "readlink", lambda path, shown=shown: shown)
            assert on_terminal() is expected
    os.close(ours)


def test_losses_and_joins_of_ranks_are_tags() -> None:
    lost = RanksLost(12, 0.5, 3.0, [1], 2, 0.2, 64, 0.1)
    joined = RanksJoined(20, 0.8, 5.0, [2], 3, 0.7, 2.5, 64, 0.1)
    assert failure_tags([lost, replace(lost, lost=[0], ranks=1, left=True)], [joined]) == {
        "lost_at_step_12": "rank 1 ended, 2 ranks left; rank 0 left, 1 rank left",
        "joined_at_step_20": "rank 2, 3 ranks then",
    }
