"""N ranks give what one rank gives, and every sample has its one place.

Sums over ranks are added in another order than one rank adds them, so weights agree to
rounding: 1e-12 in float64 and, where nothing amplifies it, 1e-5 in float32.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks, torch_beside
from trained_cases import WORKER, TrainedCases

from hvdtrain.train.checkpoints import checkpoint_files, load_checkpoint
from hvdtrain.train.options import TrainOptions

COMMON = {"kind": "plain", "lr_scaling": "none", "device": "cpu", "seed": 3}
DOUBLE = {**COMMON, "dtype": "float64"}
# 1437 samples are 28 batches of 50 and one of 37; neither 50 nor 37 divides by 2, 3 and 7.
EXACT: dict[str, dict[str, Any]] = {
    "sgd float64": {**DOUBLE, "epochs": 2, "global_batch_size": 50, "lr": 0.05},
    "adam float64": {
        **DOUBLE,
        "epochs": 2,
        "global_batch_size": 50,
        "lr": 0.002,
        "optimizer": "adam",
    },
    "sgd float32": {**COMMON, "epochs": 1, "global_batch_size": 50, "lr": 0.05},
}
# All epochs of the defaults: the promise is for the end of a run.
LONG: dict[str, dict[str, Any]] = {
    "adam float64, all epochs": {**EXACT["adam float64"], "epochs": TrainOptions().epochs}
}
LIMITS = {**dict.fromkeys([*EXACT, *LONG], 1e-12), "sgd float32": 1e-5}
# 9 samples to train on and 5 to test on: fewer than ranks, in a batch and altogether.
FEW: dict[str, dict[str, Any]] = {
    f"batches of {batch}": {
        **DOUBLE,
        "kind": "watched",
        "epochs": 2,
        "global_batch_size": batch,
        "lr": 0.5,
    }
    for batch in (4, 3)
}
# An epoch is 50 of the 60 samples that it yields, in 5 steps.
STREAM: dict[str, dict[str, Any]] = {
    "stream": {
        **DOUBLE,
        "kind": "streamed",
        "epochs": 2,
        "global_batch_size": 11,
        "lr": 0.5,
        "optimizer": "adam",
    }
}
# Two samples are left for the last batch of seven ranks.
NORMALIZED = {"normalized": {**FEW["batches of 4"], "kind": "synchronized"}}
PASSES = {"normalized, two passes": {**NORMALIZED["normalized"], "accumulate": 2}}
TAINTED = {"tainted": {**NORMALIZED["normalized"], "kind": "tainted"}}
SHORT = {"short": {**STREAM["stream"], "kind": "short"}}
DRIFT: dict[str, dict[str, Any]] = {
    "drift": {**COMMON, "kind": "drifting", "epochs": 1, "global_batch_size": 500}
}
# The average again, by way of an exchange that the user names.
NAMED = {"average by name": {**EXACT["sgd float64"], "exchange": "average:predivide=2,warmup=3"}}
# Each rank takes whole steps, which are shared otherwise.
WHOLE = {f"{name}, whole": {**EXACT[name], "shard_optimizer": False} for name in EXACT}
# Weights are averaged after each step, on three ranks with one sample each.
LOCAL = {"local steps": {**FEW["batches of 3"], "exchange": "local:steps=1"}}
SCARCE: dict[str, dict[str, Any]] = {"scarce": {**COMMON, "kind": "scarce"}}
# One launch for each number of ranks.
CASES = {
    1: EXACT | FEW | LONG | STREAM | NORMALIZED,
    3: EXACT | WHOLE | NAMED | LOCAL | STREAM | SHORT | DRIFT | SCARCE | LONG,
    7: FEW | NORMALIZED | PASSES | TAINTED,
}


def gap(one: Path, other: Path) -> float:
    mine, yours = _weights(one), _weights(other)
    assert mine.keys() == yours.keys()
    return max(float((mine[key] - yours[key]).abs().max()) for key in mine)


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = load_checkpoint(checkpoint_files(directory)[0], "pt")["model"]
    return model


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> TrainedCases:
    return TrainedCases(tmp_path_factory.mktemp("parity"), CASES)


def difference(runs: TrainedCases, one: tuple[int, str], other: tuple[int, str]) -> float:
    for size, case in (one, other):
        runs.results(size, case)
    return gap(runs.directory(*one), runs.directory(*other))


@pytest.mark.parametrize("case", [*EXACT, *LONG])
def test_ranks_give_the_weights_of_one_rank(runs: TrainedCases, case: str) -> None:
    alone, together = runs.results(1, case)[0], runs.results(3, case)[0]
    assert difference(runs, (1, case), (3, case)) <= LIMITS[case]
    assert together["weights_sha256"] == [together["weights_sha256"][0]] * 3
    assert together["final"]["loss"] == pytest.approx(alone["final"]["loss"], rel=1e-3)
    assert together["samples"] == CASES[3][case]["epochs"] * 1437


def test_the_average_by_name_gives_the_weights_of_one_rank(runs: TrainedCases) -> None:
    assert runs.results(3, "average by name")[0]["exchange"] == "average:predivide=2,warmup=3"
    assert difference(runs, (1, "sgd float64"), (3, "average by name")) <= 1e-12
    assert difference(runs, (1, "sgd float64"), (1, "adam float64")) > 1e-3  # which it would see


@pytest.mark.parametrize("case", EXACT)
def test_sharing_the_work_of_steps_changes_no_bit(runs: TrainedCases, case: str) -> None:
    assert difference(runs, (3, case), (3, f"{case}, whole")) == 0.0


def test_averaged_weights_of_each_step_are_those_of_averaged_gradients(runs: TrainedCases) -> None:
    assert len(set(runs.results(3, "local steps")[0]["weights_sha256"])) == 1
    assert difference(runs, (1, "batches of 3"), (3, "local steps")) <= 1e-12


@pytest.mark.mpich
def test_ranks_of_mpich_give_the_weights_of_one_rank(runs: TrainedCases, tmp_path: Path) -> None:
    cases = [{**case, "out": str(tmp_path / name)} for name, case in EXACT.items()]
    env = torch_beside("mpich")
    run_ranks(WORKER, 3, args=[json.dumps(cases)], mpi="mpich", env=env)
    for case in EXACT:
        runs.results(1, case)
        assert gap(runs.directory(1, case), tmp_path / case) <= LIMITS[case]


@pytest.mark.parametrize("case", FEW)
@pytest.mark.parametrize("size", [1, 7])
def test_every_sample_has_its_one_place(runs: TrainedCases, size: int, case: str) -> None:
    alone, ranks = runs.results(1, case)[0], runs.results(size, case)
    trained = sorted(number for rank in ranks for number in rank["seen"]["train"])
    tested = sorted(number for rank in ranks for number in rank["seen"]["test"])
    assert trained == sorted([*range(9)] * 2)
    assert tested == sorted([*range(100, 105)] * 2)
    assert ranks[0]["final"]["accuracy"] == alone["final"]["accuracy"]
    assert ranks[0]["final"]["loss"] == pytest.approx(alone["final"]["loss"], rel=1e-12)
    assert difference(runs, (1, case), (size, case)) <= 1e-12


@pytest.mark.parametrize("case", NORMALIZED | PASSES)
def test_ranks_without_samples_normalize_with_others(runs: TrainedCases, case: str) -> None:
    assert difference(runs, (1, "normalized"), (7, case)) <= 1e-10


def test_ranks_without_samples_look_for_a_cause_with_others(runs: TrainedCases) -> None:
    assert all("the loss is nan" in result["failed"] for result in runs.results(7, "tainted"))


def test_a_stream_gives_the_weights_of_one_rank(runs: TrainedCases) -> None:
    alone, ranks = runs.results(1, "stream")[0], runs.results(3, "stream")
    assert difference(runs, (1, "stream"), (3, "stream")) <= 1e-12
    assert alone["samples"] == ranks[0]["samples"] == 100
    # As train_recipes.py has it: epoch 1 begins with sample 1.
    expected = [(7 * number + epoch) % 60 for epoch in (0, 1) for number in range(50)]
    assert alone["seen"]["train"] == expected
    assert sorted(number for rank in ranks for number in rank["seen"]["train"]) == sorted(expected)
    assert len({tuple(rank["seen"]["train"]) for rank in ranks}) == 3


def test_a_stream_that_ends_too_early_says_so(runs: TrainedCases) -> None:
    for rank in runs.results(3, "short"):
        assert rank["refused"] == (
            "the training data ended before sample 50 of epoch 1: samples_per_epoch of the recipe "
            "must be no more than it yields"
        )


def test_some_ranks_had_no_sample(runs: TrainedCases) -> None:
    seen = [rank["seen"] for rank in runs.results(7, "batches of 3")]
    assert any(not rank["train"] for rank in seen)
    assert any(not rank["test"] for rank in seen)


def test_digests_tell_ranks_apart(runs: TrainedCases) -> None:
    """Rank 1 moves one weight by 1e-6 after its last step: its digest must be another."""
    first, second, third = runs.results(3, "drift")[0]["weights_sha256"]
    assert first == third != second


def test_more_ranks_than_training_samples_are_refused(runs: TrainedCases) -> None:
    for rank in runs.results(3, "scarce"):
        assert "3 ranks" in rank["refused"]
        assert "2 training samples" in rank["refused"]
    assert not runs.directory(3, "scarce").exists()
