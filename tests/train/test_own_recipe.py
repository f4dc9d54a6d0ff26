"""What one does with a recipe of one's own: from Python, watched, stopped, tracked, refused."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from outcomes import outcomes
from paths import TRAINING
from point_recipes import points
from ranks import launch, start
from run_files import metrics_of, summary_of
from tensorflow_environment import keras_variables, tensorflow_python

from hvdtrain.train.checkpoints import best_file, checkpoint_files, position_of

RECIPES = TRAINING / "point_recipes.py"
JOB = ["-m", "hvdtrain"]
FITTING = """
import sys
import pytest
from point_recipes import recipe
from hvdtrain.train import Callback, fit
class Stopping(Callback):
    def on_epoch_begin(self, state):
        self.stop |= state.epoch == 3
with pytest.raises(TypeError, match="'epoch'"):
    fit(recipe, epoch=2)
options = {"epochs": 9, "global_batch_size": 8, "lr_scaling": "none", "dtype": "float64"}
options |= {"set": {"width": 5}, "out": sys.argv[1], "quiet": True}
stopping = Stopping()
summary = fit(recipe, callbacks=[stopping], **options)
assert summary.epochs == 2, summary
print(f"{summary.world_size} ranks, loss {summary.final['loss']:.12f}")
assert fit(recipe, callbacks=[stopping], dry_run=2).steps == 2
"""


def test_a_function_is_fitted(tmp_path: Path) -> None:
    script = tmp_path / "fitting.py"
    script.write_text(FITTING)
    command = [sys.executable, *JOB, "run", "-np", 2, "--", script, "two"]
    said = []
    for words in (command, [sys.executable, script, "one"]):
        done = start(words, cwd=tmp_path).end()
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
        said.append(sorted(line for line in set(done.stdout.splitlines()) if "ranks, " in line))
        assert re.search(r"\nall is well: [\d.]+ ms per step; peak memory ranks? 0", done.stdout)
    assert {path.name for path in tmp_path.iterdir()} == {script.name, "one", "two"}
    # In float64 two ranks come to the loss of one.
    assert said[0][0].removeprefix("2 ranks") == said[1][0].removeprefix("1 ranks")
    assert len(set(summary_of(tmp_path / "two")["weights_sha256"])) == 1
    config = (tmp_path / "two" / "config.yaml").read_text()
    assert f'recipe: "{RECIPES}:recipe"' in config
    assert "  width: 5" in config


def test_a_killed_dry_run_leaves_nothing(tmp_path: Path) -> None:
    words = ["train", f"{RECIPES}:killed", "--dry-run", 2]
    done = start([sys.executable, *JOB, *words], env={"TMPDIR": tmp_path}).end(code=-signal.SIGKILL)
    deadline = time.monotonic() + 300
    while any(tmp_path.iterdir()):
        assert time.monotonic() < deadline, list(tmp_path.iterdir())
        time.sleep(0.02)
    assert "  results  none: a dry run" in done.stdout


def test_live_view(tmp_path: Path) -> None:
    """On a terminal of the usual width, and nothing of it in a pipe."""
    command = [*JOB, "run", "-np", "2", "--", "train", str(RECIPES)]
    command += ["--epochs", "60", "--log-every", "5", "--out", str(tmp_path / "out")]
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    )
    os.close(theirs)
    shown = _all_of(ours)
    assert process.wait(300) == 0, shown
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(r"epoch \d+/60 ━+╺?━* [1-7]/7 0:00:\d\d left slowest: rank [01], comp", text)
    assert re.search(r"\n\d+ samples/s  lr 0.\d+  loss \d.\d+, accuracy \d+.\d+%", text)
    assert not re.search(r"\n\d+ samples/s .*\r\x1b", shown)  # erased with what brings it
    assert "-:--" not in text.partition("epoch 3/60")[2]  # the rate of an epoch tells of the next
    assert "epoch 60/60  train loss" in text


def _all_of(descriptor: int) -> str:
    parts = []
    with open(descriptor, "rb", buffering=0) as terminal:
        try:
            while part := terminal.read(65536):
                parts.append(part)
        except OSError:  # the other side is gone
            pass
    return b"".join(parts).decode(errors="replace")


def test_a_tracked_run_is_stopped_and_goes_on(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    store = f"sqlite:///{tmp_path}/mlflow.db"
    tracked = ["--track", "mlflow,tensorboard", "--tracking-uri", store, "--experiment", "points"]
    train = ["train", RECIPES, *tracked, "--batch-size", 4, "--resume", "auto"]
    env = {"MLFLOW_DISABLE_TELEMETRY": "true"}
    words = [*train, "--out", "run", "--epochs", 5000]
    with launch(JOB, 2, args=words, cwd=tmp_path, env=env) as job:
        job.wait_for_output("epoch    2/5000")
        os.kill(job.rank_pids(2)[1], signal.SIGUSR1)
        done = job.wait()
    assert (done.returncode, "asked to stop" in done.stdout) == (0, True), done.stderr
    assert "samples/s\n" in done.stdout
    assert "left" not in done.stdout  # no live view in a pipe
    epochs = position_of(checkpoint_files(tmp_path / "run")[0])[0] + 2
    client = MlflowClient(store)
    assert [run.info.status for run in _runs(client)] == ["KILLED"]
    again: list[object] = [*train, "--out", "run", "--epochs", epochs]
    failing = [*train, "--out", "failed", "--epochs", 2, "--lr", 1e37, "--warmup-epochs", 0]
    # Its worker has what rank 0 keeps open for the run.
    broken = ["train", f"{RECIPES}:breaking", "--quiet", "--dry-run", 2, "--workers", 1]
    commands: list[list[Any]] = [again, failing, broken]
    went_on, failed, common = outcomes(commands, tmp_path, 2, env=env)
    assert (went_on.returncode, went_on.stderr) == (0, "")
    assert failed.returncode == 1
    assert re.match(r"hvdtrain: step \d+: the loss is (nan|inf) on rank", failed.stderr)
    assert failed.stderr.count("\n") == 1
    said = rf"{RECIPES}:breaking failed: {RECIPES}:\d+ in forward: RuntimeError: mat1 .*\n"
    assert (common.returncode, bool(re.fullmatch(f"hvdtrain: {said}", common.stderr))) == (1, True)
    alone = [sys.executable, *JOB, "run", "-np", 2, "--", *broken, "--set", "least=1"]
    done = start(alone, cwd=tmp_path).end(code=1)
    # Open MPI puts a NUL after what a rank that aborts has said.
    assert re.fullmatch(rf"\[rank 1/2\] {said}\0?", done.stderr), done.stderr
    lost, run = sorted(_runs(client), key=lambda run: run.info.status)
    assert lost.info.status == "FAILED"
    assert run.info.status == "FINISHED"
    assert run.data.params["batch_size"] == "4"
    assert run.data.params["ranks"] == "2"
    assert run.data.metrics["test/loss"] == summary_of(tmp_path / "run")["final"]["loss"]
    steps = {metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")}
    assert steps == {26 * epoch for epoch in range(1, epochs + 1)}
    best = best_file(tmp_path / "run")
    assert best is not None
    kept = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert kept == {"config.yaml", "summary.json", best.name}
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


def _runs(client: Any) -> list[Any]:
    return list(client.search_runs([client.get_experiment_by_name("points").experiment_id]))


def test_a_damaged_image_of_one_rank(tmp_path: Path) -> None:
    """The rank that meets it says so, also where a loading process has met it."""
    image = pytest.importorskip("PIL.Image")
    for split, count in (("train", 24), ("val", 4)):
        for number in range(count):
            folder = tmp_path / split / ("cat", "dog")[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            noise = np.random.default_rng(number).integers(0, 256, (12, 12, 3), np.uint8)
            image.fromarray(noise).save(folder / f"{number:02}.png")
    (tmp_path / "train" / "dog" / "07.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    train = ["train", "imagefolder", "--data-dir", tmp_path, "--quiet", "--epochs", 1]
    train += ["--batch-size", 6]
    for name in ("size=8", "crop=8", "width=4", "blocks=1"):
        train += ["--set", name]
    for more in (["--workers", 2], ["--seed", 1]):  # one rank meets it, or the other
        done = launch(JOB, 2, args=[*train, *more, "--out", f"out{more[1]}"], warm="torch").end(
            code=2
        )
        # The other rank may say that its loading processes were ended with the job.
        (line,) = [line for line in done.stderr.splitlines() if "07.png" in line]
        # Open MPI puts a NUL before what a rank that aborts has said.
        line = line.lstrip("\0")
        assert re.match(r"\[rank [01]/2\] cannot read the image .*07\.png", line), line


# Its data is beside it, and imported when the recipe is made.
SENT = """
import multiprocessing
import torch
from hvdtrain.train import Recipe
multiprocessing.set_start_method("{}", force=True)
def collate(rows):
    return torch.utils.data.default_collate(rows)
def recipe(top: bool = True):
    from beside import Rows
    chosen = collate if top else lambda rows: collate(rows)
    return Recipe(torch.nn.Linear(4, 2), Rows(), torch.nn.CrossEntropyLoss(), collate=chosen)
"""
BESIDE = """
import torch
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return torch.rand(4) + index, index % 2
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_that_are_not_forked(method: str, tmp_path: Path) -> None:
    """They run the recipe's file, and read what its ranks would."""
    (tmp_path / "sent.py").write_text(SENT.format(method))
    (tmp_path / "beside.py").write_text(BESIDE)
    train = ["train", "sent.py", "--epochs", 1, "--quiet", "--batch-size", 2]
    for workers in (0, 1):
        words = [*train, "--workers", workers, "--out", workers]
        launch(JOB, 2, args=words, cwd=tmp_path).end(code=0)
    first, second = (summary_of(tmp_path / out)["weights_sha256"] for out in "01")
    assert first == second
    words = [*train, "--workers", 1, "--out", "none", "--set", "top=false"]
    done = launch(JOB, 1, args=words, cwd=tmp_path).end(code=2)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain: ")]
    assert re.match("hvdtrain: --workers 1: data cannot be sent to other processes .*lambda", line)


def test_with_keras(tmp_path: Path) -> None:
    """Two ranks on one backend and one on another agree, and frameworks refuse others' models."""
    np.save(tmp_path / "a.npy", points(300, 8).inputs)
    own = TRAINING / "keras_points.py"
    train: list[object] = [
        *("train", own, "--framework", "keras", "--epochs", 2, "--quiet", "--out", "run")
    ]
    use: list[list[object]] = [
        ["evaluate", "run"],
        ["predict", "run", "a.npy", "--out", "a-out.npy"],
    ]
    down: list[object] = [
        *("train", f"{own}:valley", "--framework", "keras", "--quiet", "--momentum", 0),
        *("--lr", 0.125, "--lr-scaling", "none", "--global-batch-size", 4),
        *("--evaluate-every", "2 steps", "--checkpoint-every", "4 steps"),
    ]
    restored = [
        [*down, "--out", "valley", "--epochs", 3, "--shard-optimizer"],
        [*down, "--out", "valley", "--epochs", 4, "--resume", "auto"],
    ]
    early = ["train", f"{own}:stopped", *train[2:-1], "early", "--epochs", 5]
    wrong: list[list[object]] = [
        *(["train", RECIPES, "--framework", "keras"], ["train", own]),
        *([early[0], f"{own}:{name}", *early[2:-3], name] for name in ("swapping", "breaking")),
    ]
    outputs, measured = [], []
    for size, backend, commands in (
        # A Keras model is a module of torch, too, on torch.
        (2, "torch", [train, *use, *restored, early, *wrong]),
        (1, "tensorflow", [*use, *restored]),
    ):
        how = {"python": tensorflow_python(), "env": keras_variables(backend)}
        results = outcomes(commands, tmp_path, size, **how)
        used = results[1:3] if size == 2 else results[:2]
        if size == 2:
            stopped, *refused = results[5:]
            assert stopped.returncode == 0, stopped
        assert [result.returncode for result in results[size - 1 : size + 3]] == [0] * 4, results
        summary = summary_of(tmp_path / "valley")
        assert (summary["steps"], summary["best"]["step"]) == (12, 4)
        assert summary["final"]["loss"] == pytest.approx(0.08**2)
        shutil.rmtree(tmp_path / "valley")
        assert [result.returncode for result in used] == [0, 0], used
        measured.append(json.loads(used[0].stdout))
        outputs.append(np.load(tmp_path / "a-out.npy"))
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-6, atol=1e-6)
    assert outputs[0].shape == (300, 3)
    summary = summary_of(tmp_path / "early")
    assert (summary["epochs"], summary["ended"]) == (3, "callback of rank 0")
    assert summary["final"]["loss"] == pytest.approx(metrics_of(tmp_path / "early")[1]["loss"])
    for name in ("loss", "accuracy"):
        assert measured[1][name] == pytest.approx(measured[0][name], rel=1e-6)
    for code, result, words in zip(
        (2, 2, 2, 1),
        refused,
        ("--framework torch", "--framework keras", "on_test_begin", f"breaking failed: {own}:"),
        strict=True,
    ):
        assert result.returncode == code, result
        assert result.stderr.count("\n") == 1
        assert words in result.stderr
