"""Training with a parameter server, against plain training, and what it must keep in any order."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import TRAINING
from ranks import run_ranks, start
from run_files import summary_of
from tensorflow_environment import keras_variables, tensorflow_python
from trained_cases import TrainedCases

from hvdtrain.train.checkpoints import checkpoint_files, load_checkpoint
from hvdtrain.train.inference import options_of_run

POINTS = TRAINING / "point_recipes.py"
COMMON: dict[str, Any] = {"lr_scaling": "none", "device": "cpu", "seed": 3}
# 100 samples: 9 steps, the last one of 4 samples.
SGD = {**COMMON, "kind": "noisy", "global_batch_size": 12, "epochs": 2}
ADAM = {**SGD, "optimizer": "adam", "weight_decay": 0.01, "accumulate": 2}
# 9 samples: the last step has one sample, and only one worker has a gradient.
SHORT = {**COMMON, "kind": "watched", "global_batch_size": 4, "epochs": 3, "dtype": "float64"}
CHANGING = {**SHORT, "kind": "changing", "keep_checkpoints": 3}
RATED = {**SHORT, "kind": "rated"}
NORMED = {**COMMON, "kind": "normed", "global_batch_size": 10, "epochs": 2, "dtype": "float64"}
DIGITS = {**COMMON, "kind": "plain", "epochs": 6, "batch_size": 32}
# Servers hold parts of the same parameter.
CUT = {**DIGITS, "optimizer": "adam", "epochs": 1}
STOPPED = {"stop": 13, "eager": True}  # in the second epoch

CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "sgd": SGD,
        "adam": ADAM,
        "short": SHORT,
        "cut": CUT,
        "alone": {**SGD, "strategy": "ps"},
        "changing": CHANGING,
        "rated": RATED,
    },
    2: {
        "rated": {**RATED, "strategy": "ps"},
        "sgd": {**SGD, "strategy": "ps"},
        "adam": {**ADAM, "strategy": "ps:mode=async,staleness=0"},
        "sync": {**ADAM, "strategy": "ps:mode=sync"},
        "stopped": {**ADAM, **STOPPED, "strategy": "ps"},
        "resumed": {**ADAM, "strategy": "ps", "out": "stopped", "resume": "auto"},
        "normed": NORMED,
        "idle": {**SGD, "strategy": "ps:mode=sync,backup=1"},
    },
    3: {
        "cut": {**CUT, "strategy": "ps:servers=2"},
        "stopped": {**ADAM, **STOPPED, "strategy": "ps:servers=2"},
        "resumed": {**ADAM, "strategy": "ps:servers=2", "out": "stopped", "resume": "auto"},
        "short": {**SHORT, "strategy": "ps:mode=sync"},
        "changing": {**CHANGING, "strategy": "ps:mode=sync"},
        "normed": {**NORMED, "strategy": "ps:mode=sync"},
        "async": {**SGD, "strategy": "ps:staleness=1"},
        "backup": {**SGD, "strategy": "ps:mode=sync,backup=1"},
        "digits": {**DIGITS, "strategy": "ps"},
    },
    4: {
        "short": {**SHORT, "strategy": "ps:servers=2,mode=sync"},
        "changing": {**CHANGING, "strategy": "ps:servers=2,mode=sync"},
        "async": {**SGD, "strategy": "ps:servers=2,staleness=0"},
        "backup": {**SGD, "strategy": "ps:mode=sync,backup=2", "eager": True},
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> TrainedCases:
    return TrainedCases(tmp_path_factory.mktemp("served"), CASES)


def digests(results: list[dict[str, Any]]) -> set[str]:
    return {digest for result in results for digest in result["weights_sha256"]}


def weights(runs: TrainedCases, size: int, name: str) -> dict[str, torch.Tensor]:
    runs.results(size, name)
    (newest, *_) = checkpoint_files(runs.directory(size, name))
    model: dict[str, torch.Tensor] = load_checkpoint(newest, "pt")["model"]
    return model


@pytest.mark.parametrize(
    ("size", "case", "plain"),
    [
        *((2, "sgd", "sgd"), (2, "adam", "adam"), (2, "sync", "adam"), (2, "resumed", "adam")),
        *((3, "cut", "cut"), (3, "resumed", "adam")),
    ],
)
def test_one_worker_is_plain_training(runs: TrainedCases, size: int, case: str, plain: str) -> None:
    """Bit for bit, also where servers cut a parameter, and after a resume within an epoch."""
    assert digests(runs.results(size, case)) == digests(runs.results(1, plain))
    assert list(runs.results(size, case)[0]["parameter_server"]["staleness"]) == ["0"]


@pytest.mark.parametrize("case", ["short", "changing"])
@pytest.mark.parametrize("size", [3, 4])
def test_synchronous_workers_are_one_rank_with_the_whole_batch(
    runs: TrainedCases, size: int, case: str
) -> None:
    """Also where callbacks change the model between rounds."""
    expected = weights(runs, 1, case)
    torch.testing.assert_close(weights(runs, size, case), expected, rtol=1e-12, atol=1e-14)
    # 9 samples in steps of 4, 4 and 1: five gradients in an epoch.
    servers = size - 2
    assert runs.results(size, case)[0]["parameter_server"]["staleness"] == {"0": 3 * 5 * servers}


@pytest.mark.parametrize("size", [1, 3])
def test_checkpoints_hold_what_there_was_before_callbacks(runs: TrainedCases, size: int) -> None:
    _, *sums = runs.results(size, "changing")[0]["seen"]["sums"]
    _, *files = checkpoint_files(runs.directory(size, "changing"))
    assert len(sums) == len(files) == 2
    for found, file in zip(sums, reversed(files), strict=True):
        assert load_checkpoint(file, "pt")["model"]["layers.weight"].sum() == found


@pytest.mark.parametrize("size", [1, 2])
def test_a_rate_that_a_callback_changes_is_refused(runs: TrainedCases, size: int) -> None:
    for result in runs.results(size, "rated"):
        assert "from 0.02 to 0.01 before step 4, but train sets it in each" in result["refused"]


def test_statistics_of_samples_are_the_workers(runs: TrainedCases) -> None:
    """As where two ranks all-reduce: the server's own have seen no sample, and do not count."""
    expected = weights(runs, 2, "normed")
    torch.testing.assert_close(weights(runs, 3, "normed"), expected, rtol=1e-12, atol=1e-14)
    assert len(digests(runs.results(3, "normed"))) == 1


@pytest.mark.parametrize(("size", "case", "servers"), [(3, "async", 1), (4, "async", 2)])
def test_asynchronous_gradients_are_applied_once(
    runs: TrainedCases, size: int, case: str, servers: int
) -> None:
    results = runs.results(size, case)
    assert len(digests(results)) == 1
    counts = results[0]["parameter_server"]
    assert counts["applied"] == sum(counts["staleness"].values()) == 2 * 9 * 2 * servers
    assert counts["dropped"] == 0
    most = 2 * int("staleness=1" in CASES[size][case]["strategy"]) + 1
    assert max(map(int, counts["staleness"])) <= most


@pytest.mark.parametrize(("size", "case"), [(3, "async"), (3, "backup"), (4, "backup")])
def test_every_sample_is_used_once_in_an_epoch(runs: TrainedCases, size: int, case: str) -> None:
    results = runs.results(size, case)
    *workers, server = [Counter(result["seen"]["train"]) for result in results]
    assert not server
    assert all(workers)
    assert sum(workers, Counter()) == dict.fromkeys(range(100), 2)
    assert results[0]["samples"] == 200


@pytest.mark.parametrize(("size", "backup"), [(3, 1), (4, 2)])
def test_late_gradients_are_dropped(runs: TrainedCases, size: int, backup: int) -> None:
    results = runs.results(size, "backup")
    counts = results[0]["parameter_server"]
    assert (counts["applied"], counts["dropped"]) == (2 * 9, 2 * 9 * backup)
    assert len(digests(results)) == 1
    assert results[0]["steps"] == 18


def test_digits_are_learned(runs: TrainedCases) -> None:
    results = runs.results(3, "digits")
    assert results[0]["final"]["accuracy"] > 0.85
    counts = summary_of(runs.directory(3, "digits"))["parameter_server"]
    assert (counts["servers"], counts["mode"], counts["staleness"]) == (
        1,
        "async",
        results[0]["parameter_server"]["staleness"],
    )
    assert counts["max_staleness"] == 4
    assert counts["applied"] == 6 * 23 * 2  # 1437 samples in rounds of 64


def test_ranks_that_cannot_serve_are_refused(runs: TrainedCases) -> None:
    (alone,) = runs.results(1, "alone")
    assert alone["refused"] == "--strategy ps needs 2 ranks or more, 1 of them as servers, got 1"
    for idle in runs.results(2, "idle"):
        assert "backup must be less than the number of workers, 1 of 2 ranks" in idle["refused"]


@pytest.mark.parametrize(
    ("recipe", "lr", "code", "said"),
    [
        ("digits", "1e30", 1, "step 2: the gradient of this rank is not finite"),
        (f"{POINTS}:clamped", "1e-3", 1, "a callback changed weights in on_train_batch_end, where"),
        (f"{POINTS}:thawed", "1e-3", 2, "parameter 0.weight was frozen when training began, so no"),
    ],
)
def test_a_worker_that_raises_ends_the_job(
    recipe: str, lr: str, code: int, said: str, tmp_path: Path
) -> None:
    options = ["--lr", lr, "--strategy", "ps", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-m", "hvdtrain", "run", "-np", "2", "--", "train", recipe]
    done = start([*command, *options], cwd=tmp_path).end(code=code)
    assert f"[rank 0/2] {said}" in done.stderr
    assert "[rank 0/2] Traceback" not in done.stderr


def test_any_number_of_ranks_evaluates_what_servers_have_trained(runs: TrainedCases) -> None:
    run = runs.directory(3, "digits")
    assert len(runs.results(3, "digits")) == 3
    assert options_of_run(run, "newest", {}).worker_count(1) == 1
    assert options_of_run(run, "newest", {}).strategy == "allreduce"


WORKER = Path(__file__).with_name("keras_served_worker.py")
LIMIT_SECONDS = 600
# 203 samples in rounds of 24: 9 rounds in each of two epochs, in which all workers have samples.
ROUNDS = 2 * 9
# Of one worker, in float32: a compiled step may round otherwise than servers do.
ONE_WORKER = {"torch": 0.0, "tensorflow": 1e-6 * ROUNDS, "jax": 1e-6 * ROUNDS}
# Of two, in float64: Keras computes in float32 matrix products on torch, and tanh on jax.
TWO_WORKERS = {"torch": 1e-6, "tensorflow": 1e-12, "jax": 1e-6}


@pytest.mark.parametrize(
    "backend",
    ["torch", *(pytest.param(name, marks=pytest.mark.soak) for name in ("tensorflow", "jax"))],
)
def test_three_ranks(backend: str, tmp_path: Path) -> None:
    done = run_ranks(
        WORKER,
        3,
        args=[tmp_path],
        python=tensorflow_python(),
        env=keras_variables(backend),
        timeout_seconds=LIMIT_SECONDS,
    )
    runs: dict[str, list[dict[str, Any]]] = {
        name: [result[name] for result in done.results] for name in done.results[0]
    }
    for name, of_ranks in runs.items():
        digests = {digest for one in of_ranks for digest in one.get("weights_sha256", ())}
        assert len(digests) == ("refused" not in of_ranks[0]), name
    check_exactness(runs, backend)
    assert [runs[name][0]["steps"] for name in ("reduced", "served")] == [3 * 9, 4 * 9]
    refused = {name: of_ranks[-1].get("refused", "") for name, of_ranks in runs.items()}
    assert "clipnorm=1.0 of the recipe's optimizer SGD: leave it out" in refused["clipped"]
    assert "callback changed the settings of model.optimizer, which" in refused["misled"]
    assert "the constraint of net/limited/kernel: servers hold parts" in refused["limited"]
    assert "the recipe's optimizer Lamb: servers step on parts of parameters" in refused["lamb"]


def check_exactness(runs: dict[str, list[dict[str, Any]]], backend: str) -> None:
    """One worker is plain Keras, and synchronous workers are it with the whole batch."""
    distances = {name: of[0]["distance"] for name, of in runs.items() if "distance" in of[0]}
    for name in ("sgd", "adamw", "resumed", "changed"):
        assert distances[name] <= ONE_WORKER[backend], name
    assert distances["sync"] <= TWO_WORKERS[backend]
    for name, of_one_kind in (("adamw", "servers"), ("sync", "workers")):  # two of them
        assert runs[name][0]["parameter_server"]["staleness"] == {"0": 2 * ROUNDS}, of_one_kind
