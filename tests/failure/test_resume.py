"""A run that was interrupted goes on as if it had not been."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mpis import MPICH
from paths import TESTS
from ranks import launch, mpi_python, run_ranks, start, torch_beside
from run_files import both_splits, epochs_of, metrics_of, summary_of

from hvdtrain.errors import STOPPING
from hvdtrain.train.checkpoints import checkpoint_files, position_of
from hvdtrain.train.records import MARKER

WORKER = TESTS / "train" / "train_worker.py"
OPTIONS = ["--optimizer", "adam", "--global-batch-size", 50, "--seed", 5]
JOB = ["-m", "hvdtrain", "train", "digits"]


@pytest.mark.parametrize("size", [1, 3])
def test_resumed_run_is_bitwise_the_uninterrupted_one(size: int, tmp_path: Path) -> None:
    """By MPI, where sums of three ranks depend on the bucket plan, which checkpoints have."""
    whole, parts = (tmp_path / name for name in ("whole", "parts"))
    options = {"kind": "plain", "optimizer": "adam", "global_batch_size": 50, "device": "cpu"}
    stops = [{"epochs": epochs, "stop": step} for epochs, step in ((2, 12), (3, 17), (3, 5))]
    starts: list[dict[str, Any]] = [
        {**options, "epochs": 3, "out": str(whole)},
        {**options, "epochs": 1, "out": str(parts)},
    ]
    resumes: list[dict[str, Any]] = [
        # An epoch has 28 steps with 50 samples, and one with 37.
        *({**options, **stop, "out": str(parts), "resume": "auto"} for stop in stops),
        {**options, "epochs": 3, "out": str(parts), "resume": "auto"},
        {**options, "epochs": 3, "out": str(parts), "resume": "auto"},
    ]
    for cases, nbytes in ((starts, 1 << 20), (resumes, 3000)):
        env = {"HVDTRAIN_SHARED_MEMORY": 0, "HVDTRAIN_BUCKET_BYTES": nbytes}
        done = run_ranks(WORKER, size, args=[json.dumps(cases)], env=env, warm="torch")
    for results in done.results:
        stopped = [result["newest"].rpartition("-")[0] for result in results[:3]]
        assert stopped == ["checkpoint-0001+600", "checkpoint-0002", "checkpoint-0002+250"]
        told = f"rank {size - 1} was asked to stop: 1 epoch and 600 samples are done and saved\n"
        assert results[0]["marker"] == told
    assert not (parts / MARKER).exists()
    assert summary_of(parts)["weights_sha256"] == summary_of(whole)["weights_sha256"]
    assert len(set(summary_of(parts)["weights_sha256"])) == 1
    assert summary_of(parts)["final"] == summary_of(whole)["final"]
    assert summary_of(parts)["samples"] == 3 * 1437
    assert epochs_of(parts) == epochs_of(whole) == both_splits(3)
    for ours, theirs in zip(metrics_of(parts), metrics_of(whole), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
        assert (ours["accuracy"], ours["step"]) == (theirs["accuracy"], theirs["step"])
    assert [position_of(path) for path in checkpoint_files(parts)] == [(3, 0), (2, 250), (2, 0)]


def test_a_signal_to_one_rank_stops_all_to_go_on(tmp_path: Path) -> None:
    arguments = [*OPTIONS, "--out", tmp_path, "--resume", "auto", "--epochs", 500]
    with launch(JOB, 2, args=arguments) as job:
        job.wait_for_output("epoch   2/500")
        os.kill(job.rank_pids(2)[1], signal.SIGUSR1)
        done = job.ended()
    assert (done.returncode, done.stderr) == (0, "")
    told = (tmp_path / MARKER).read_text()
    assert told.startswith("rank 1 was asked to stop: ")
    assert f"\n{told}to continue, give the same command" in done.stdout
    assert not (tmp_path / "summary.json").exists()
    epochs, samples = position_of(checkpoint_files(tmp_path)[0])
    assert epochs >= 2
    assert epochs_of(tmp_path) == both_splits(epochs)
    part = f" and {samples} samples" if samples else ""
    assert told.endswith(f": {epochs} epochs{part} are done and saved\n")


# A step that never ends, in C, where Python handles no signal.
ENDLESS = """
from dataclasses import replace
from hvdtrain.train.recipes.torch_recipes import digits

def loss(outputs, labels):
    print("in the step", flush=True)
    return sum(range(10**15))

def recipe():
    return replace(digits(), loss=loss)
"""


@pytest.mark.parametrize("mpi", ["openmpi", MPICH])
def test_ctrl_c_saves_and_another_ends_the_job_at_once(mpi: str, tmp_path: Path) -> None:
    run = [mpi_python(mpi), "-m", "hvdtrain", "run", "-np", 2, "--"]
    env = torch_beside(mpi)
    with start([*run, *JOB[2:], *OPTIONS, "--out", tmp_path, "--epochs", 500], env=env) as job:
        job.wait_for_output("epoch   2/500")
        job.interrupt()  # as the terminal does, run and mpirun
        done = job.ended(code=128 + signal.SIGINT)
    told = (tmp_path / MARKER).read_text()
    assert f"\n{told}to continue, give the same command --out {tmp_path}" in done.stdout
    assert done.stderr == f"{STOPPING}\n"
    (tmp_path / "endless.py").write_text(ENDLESS)
    with start([*run, "train", "endless.py", "--out", "out"], env=env, cwd=tmp_path) as job:
        job.wait_for(lambda: job.stdout.count("in the step") == 2, "took a step")
        job.interrupt()
        job.wait_for_output(STOPPING)
        job.interrupt()
        done = job.ended(code=128 + signal.SIGINT)
    assert done.stderr == f"{STOPPING}\n" or mpi == "mpich"  # which says how ranks ended


def test_ctrl_c_without_a_launcher_saves(tmp_path: Path) -> None:
    words = [sys.executable, *JOB, "--out", tmp_path, "--epochs", 500]
    with start(words) as job:
        job.wait_for_output("epoch   2/500")
        os.kill(job.process.pid, signal.SIGINT)
        done = job.ended(code=128 + signal.SIGINT)
    assert (tmp_path / MARKER).read_text() in done.stdout
    assert done.stderr.split("\n") == ["", STOPPING, "", "[rank 0/1] interrupted", ""]


# 100 samples in steps of 12, the last of four: nine an epoch.
RICH = {
    "kind": "noisy", "optimizer": "adam", "accumulate": 2, "amp": "bf16", "ema": 0.9,
    "global_batch_size": 12, "device": "cpu", "seed": 3, "checkpoint_every": "5 steps",
    "resume": "auto", "epochs": 3,
}  # fmt: skip
SCALED = {**RICH, "amp": "fp16", "clip_norm": 0.5}


def test_a_killed_run_goes_on_within_the_epoch_with_all_features(tmp_path: Path) -> None:
    """Also on fewer ranks, where each sample of the epoch is used once."""
    names = ("whole", "parts", "elsewhere", "scaled", "scaled-parts")
    whole, parts, elsewhere, scaled, scaled_parts = (tmp_path / name for name in names)
    killed = {**RICH, "out": str(parts), "kill": 13, "saved": "checkpoint-0001+12"}
    with launch(WORKER, 3, args=[json.dumps([killed])]) as job:
        assert job.ended().returncode != 0
    shutil.copytree(parts, elsewhere)
    cases = [
        {**RICH, "out": str(whole)}, {**RICH, "out": str(parts)}, {**SCALED, "out": str(scaled)},
        {**SCALED, "out": str(scaled_parts), "stop": 7}, {**SCALED, "out": str(scaled_parts)},
    ]  # fmt: skip
    run_ranks(WORKER, 3, args=[json.dumps(cases)], warm="torch")
    for one, other in ((whole, parts), (scaled, scaled_parts)):
        assert summary_of(one)["weights_sha256"] == summary_of(other)["weights_sha256"]
        assert len(set(summary_of(one)["weights_sha256"])) == 1
        # The final loss is that of the averaged weights.
        for field in ("final", "best", "steps", "samples"):
            assert summary_of(one)[field] == summary_of(other)[field]
        assert epochs_of(one) == epochs_of(other) == both_splits(3)
        # Outputs are in a half type, which has not the digits of a mean loss.
        loss = torch.tensor(summary_of(one)["final"]["loss"], dtype=torch.float64)
        assert loss != loss.half()
    assert summary_of(whole)["weights_sha256"] != summary_of(scaled)["weights_sha256"]
    going_on = [{**RICH, "epochs": 2, "out": str(elsewhere)}]
    done = run_ranks(WORKER, 2, args=[json.dumps(going_on)], warm="torch")
    # What was used before the checkpoint: an epoch, and a step of the next.
    before = []
    for rank in range(3):
        seen = json.loads((elsewhere / f"seen-{rank}.json").read_text())
        of_last_step = (rank + 1) * 4 // 3 - rank * 4 // 3
        before += seen[: 8 * 4 + of_last_step + 4]
    after = [number for (result,) in done.results for number in result["seen"]["train"]]
    assert (len(before), len(after)) == (112, 88)
    assert sorted(before + after) == sorted([*range(100)] * 2)


# Sends it when `train` imports what trains, which takes seconds.
SIGNALLED_EARLY = """
import os, signal, sys

class Early:
    def find_spec(self, name, path=None, target=None):
        if name == "hvdtrain.train.session":
            os.kill(os.getpid(), signal.SIGUSR1)

sys.meta_path.insert(0, Early())
from hvdtrain.cli.main import main
main(["train", "digits", "--epochs", "100", "--quiet", "--out", "out"])
"""


SIGNALLED_LATE = """
import os, signal
from hvdtrain.cli.main import main
try:
    main(["train", "digits", "--epochs", "1", "--quiet", "--out", "out"])
finally:
    os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_a_signal_after_the_last_step_is_ignored(tmp_path: Path) -> None:
    start([sys.executable, "-c", SIGNALLED_LATE], cwd=tmp_path).end(code=0)
    assert not (tmp_path / "out" / MARKER).exists()


def test_a_signal_before_the_first_step_is_not_lost(tmp_path: Path) -> None:
    start([sys.executable, "-c", SIGNALLED_EARLY], cwd=tmp_path).end(code=0)
    assert (tmp_path / "out" / MARKER).exists()
