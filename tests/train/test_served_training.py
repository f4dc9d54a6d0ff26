"""Training with a parameter server, against plain training, and what it must keep in any order."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import start
from run_files import summary_of
from trained_cases import TrainedCases

from hvdtrain.train.checkpoint.file import load_checkpoint
from hvdtrain.train.checkpoint.saver import checkpoint_files
from hvdtrain.train.inference import options_of_run

COMMON: dict[str, Any] = {"lr_scaling": "none", "device": "cpu", "seed": 3}
# 100 samples: 9 steps, the last one of 4 samples.
SGD = {**COMMON, "kind": "noisy", "global_batch_size": 12, "epochs": 2}
ADAM = {**SGD, "optimizer": "adam", "weight_decay": 0.01, "accumulate": 2}
# 9 samples: the last step has one sample, and only one worker has a gradient.
SHORT = {**COMMON, "kind": "watched", "global_batch_size": 4, "epochs": 3, "dtype": "float64"}
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
    },
    2: {
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
        "normed": {**NORMED, "strategy": "ps:mode=sync"},
        "async": {**SGD, "strategy": "ps:staleness=1"},
        "backup": {**SGD, "strategy": "ps:mode=sync,backup=1"},
        "digits": {**DIGITS, "strategy": "ps"},
    },
    4: {
        "short": {**SHORT, "strategy": "ps:servers=2,mode=sync"},
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
        (2, "sgd", "sgd"),
        (2, "adam", "adam"),
        (2, "sync", "adam"),
        (2, "resumed", "adam"),
        (3, "cut", "cut"),
        (3, "resumed", "adam"),
    ],
)
def test_one_worker_is_plain_training(runs: TrainedCases, size: int, case: str, plain: str) -> None:
    """Bit for bit, also where servers cut a parameter, and after a resume within an epoch."""
    assert digests(runs.results(size, case)) == digests(runs.results(1, plain))
    pushes = runs.results(size, case)[0]["parameter_server"]
    assert list(pushes["staleness"]) == ["0"]


@pytest.mark.parametrize("size", [3, 4])
def test_synchronous_workers_are_one_rank_with_the_whole_batch(
    runs: TrainedCases, size: int
) -> None:
    expected = weights(runs, 1, "short")
    torch.testing.assert_close(weights(runs, size, "short"), expected, rtol=1e-12, atol=1e-14)
    # 9 samples in steps of 4, 4 and 1: five gradients in an epoch.
    servers = size - 2
    assert runs.results(size, "short")[0]["parameter_server"]["staleness"] == {"0": 3 * 5 * servers}


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


def test_a_worker_that_raises_ends_the_job(tmp_path: Path) -> None:
    options = ["--lr", "1e30", "--strategy", "ps", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-m", "hvdtrain", "run", "-np", "2", "--", "train", "digits"]
    done = start([*command, *options], cwd=tmp_path).end(code=1)
    assert "[rank 0/2] step 2: the gradient of this rank is not finite" in done.stderr
    assert "[rank 0/2] Traceback" not in done.stderr


def test_any_number_of_ranks_evaluates_what_servers_have_trained(runs: TrainedCases) -> None:
    run = runs.directory(3, "digits")
    assert len(runs.results(3, "digits")) == 3
    assert options_of_run(run, "newest", {}).worker_count(1) == 1
    assert options_of_run(run, "newest", {}).strategy == "allreduce"
