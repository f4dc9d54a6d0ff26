"""A run that was interrupted goes on as if it had not been."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest
from ranks import launch, run_ranks
from run_files import both_splits, epochs_of, summary_of

from hvdtrain.train.checkpoint import checkpoint_epoch, checkpoint_files

WORKER = Path(__file__).parent.with_name("parity") / "train_worker.py"
LIMIT_SECONDS = 120
OPTIONS = ["--optimizer", "adam", "--global-batch-size", 50, "--seed", 5]
JOB = ["-m", "hvdtrain", "train", "digits"]


@pytest.mark.parametrize("size", [1, 3])
def test_resumed_run_is_bitwise_the_uninterrupted_one(size: int, tmp_path: Path) -> None:
    whole, parts = (tmp_path / name for name in ("whole", "parts"))
    options = {"kind": "plain", "optimizer": "adam", "global_batch_size": 50, "device": "cpu"}
    cases = [
        {**options, "epochs": 3, "out": str(whole)},
        {**options, "epochs": 1, "out": str(parts)},
        {**options, "epochs": 2, "out": str(parts), "resume": "auto"},
        {**options, "epochs": 3, "out": str(parts), "resume": "auto"},
        {**options, "epochs": 3, "out": str(parts), "resume": "auto"},
    ]
    run_ranks(WORKER, size, args=[json.dumps(cases)], timeout_seconds=LIMIT_SECONDS)
    assert summary_of(parts)["weights_sha256"] == summary_of(whole)["weights_sha256"]
    assert len(set(summary_of(parts)["weights_sha256"])) == 1
    assert summary_of(parts)["final"] == summary_of(whole)["final"]
    assert summary_of(parts)["samples"] == 3 * 1437
    assert epochs_of(parts) == epochs_of(whole) == both_splits(3)
    assert [checkpoint_epoch(path) for path in checkpoint_files(parts)] == [3, 2, 1]


def test_a_terminated_run_goes_on_from_its_last_whole_checkpoint(tmp_path: Path) -> None:
    with launch(JOB, 2, args=[*OPTIONS, "--out", tmp_path, "--epochs", 500]) as job:
        job.wait_for_output("epoch   3/500", LIMIT_SECONDS)
        job.process.send_signal(signal.SIGTERM)
        done = job.wait(20)
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        job.assert_nothing_left()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    newest, before = checkpoint_files(tmp_path)[:2]
    epochs = checkpoint_epoch(newest)
    newest.write_bytes(newest.read_bytes()[:-1000])
    leftover = tmp_path / f".unfinished-{socket.gethostname()}-{job.process.pid}"
    leftover.write_bytes(b"what SIGKILL leaves")
    arguments = [*OPTIONS, "--out", tmp_path, "--epochs", epochs, "--resume", "auto"]
    done = run_ranks(JOB, 2, args=arguments, timeout_seconds=LIMIT_SECONDS)
    assert f"{newest} is damaged" in done.stderr
    assert f"{before}, {epochs - 1} epochs done" in done.stdout
    assert summary_of(tmp_path)["epochs"] == epochs
    assert epochs_of(tmp_path) == both_splits(epochs)
    files = checkpoint_files(tmp_path)
    assert [checkpoint_epoch(path) for path in files] == list(range(epochs, 0, -1))
    assert not leftover.exists()
