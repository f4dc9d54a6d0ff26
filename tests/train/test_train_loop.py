"""What the loop does on the way, on three ranks: evaluate, save, stop early, watch the ranks."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks
from run_files import metrics_of, summary_of
from trained_cases import WORKER, TrainedCases

from hvdtrain.data.sampling import epoch_permutation
from hvdtrain.train.checkpoints import best_file, checkpoint_files, load_checkpoint, position_of

SIZE = 3
POISON = 37  # of train_recipes.py

COMMON: dict[str, Any] = {"lr_scaling": "none", "device": "cpu", "seed": 3}
# 12 samples in steps of 4: an epoch has three of them.
VALLEY = {
    **COMMON, "kind": "valley", "dtype": "float64", "momentum": 0.0, "lr": 0.1,
    "global_batch_size": 4, "epochs": 50, "evaluate_every": "2 steps",
    "checkpoint_every": "4 steps", "keep_checkpoints": 2,
}  # fmt: skip
# 100 samples: 9 steps.
NOISY = {**COMMON, "kind": "noisy", "global_batch_size": 12, "epochs": 2}
POISONED = {**NOISY, "kind": "poisoned", "optimizer": "adam", "ema": 0.9}
# Ranks keep what one bit has lost, or the state of their own Adam, or a velocity of all ranks.
ALONE = {**NOISY, "optimizer": "adam", "checkpoint_every": "6 steps"}
RESUMED: dict[str, dict[str, Any]] = {
    "onebit": {**NOISY, "exchange": "onebit:hierarchical=false,warmup=2"},
    "local": {**ALONE, "exchange": "local:steps=5"},
    "postlocal": {**ALONE, "exchange": "postlocal:after=4,steps=3"},
    "diloco": {**ALONE, "exchange": "diloco:steps=4,fragments=2"},
    "blocks": {**ALONE, "exchange": "blockmomentum:block=30,state=keep"},
    "states": {**NOISY, "kind": "carrying"},
    # The worker has all runs choose alike, whatever they measure.
    "auto": {**NOISY, "exchange": "auto:allow=half,steps=2", "apart": True, "quiet": False},
}
RESTORED = {**VALLEY, "kind": "restoring"}
RESTORING: dict[str, dict[str, Any]] = {
    "restoring": {**RESTORED, "epochs": 3},
    "restoring on": {**RESTORED, "epochs": 4, "resume": "auto", "out": "restoring"},
    "restoring elsewhere": {**RESTORED, "epochs": 5, "after": "restoring"},
    "restoring averages": {**RESTORED, "epochs": 3, "ema": 0.5},
    "restoring shared": {**RESTORED, "epochs": 3, "shard_optimizer": True},
}
CASES: dict[str, dict[str, Any]] = {
    "valley": {**VALLEY, "early_stop": 3},
    "on": {**VALLEY, "early_stop": 4, "resume": "auto", "out": "valley"},
    "dry": {**NOISY, "dry_run": 2},
    "overfit": {**NOISY, "overfit": 2, "epochs": 3},
    **RESTORING,
    "untested": {**VALLEY, "kind": "untested"},
    **{
        kind: {**VALLEY, "kind": kind, "epochs": 2, "schedule": "step", "milestones": "1"}
        for kind in ("noting", "monitored")
    },
    "stopping": {**VALLEY, "kind": "stopping"},
    "failing": {**VALLEY, "kind": "failing"},
    "uncalled": {**VALLEY, "kind": "uncalled"},
    "timed": {
        **NOISY, "kind": "slow", "eager": True, "epochs": 3, "checkpoint_every": "0.1 seconds",
        "evaluate_every": "0.2 seconds", "keep_checkpoints": 2,
    },
    "drifting": {
        **COMMON, "kind": "drifting", "global_batch_size": 500, "epochs": 2, "watch_every": 5,
        "shard_optimizer": False,  # otherwise the next step gives all ranks the owner's weights
    },
    "divided": {**NOISY, "epochs": 4, "divide_epochs": True},
    "embedded": {**NOISY, "kind": "embedded", "shard_optimizer": False},
    "poisoned": POISONED,
    "skipping": {**POISONED, "non_finite": "skip"},
    "adasum": {**NOISY, "exchange": "adasum:warmup=2", "watch_every": 1, "clip_norm": 1.0},
    "flushed": {
        **NOISY, "exchange": "local:steps=5", "watch_every": 1, "evaluate_every": "4 steps",
    },
    "flushed again": {**NOISY, "exchange": "local:steps=5", "resume": "auto", "out": "flushed"},
    **RESUMED,
    **{f"{name} stopped": {**case, "stop": 6} for name, case in RESUMED.items()},
    **{
        f"{name} on": {**case, "resume": "auto", "out": f"{name} stopped"}
        for name, case in RESUMED.items()
    },
    "auto": {**RESUMED["auto"], "quiet": True},
    "another": {**NOISY, "exchange": "local:steps=2", "resume": "auto", "out": "onebit stopped"},
    "adasum poisoned": {**NOISY, "kind": "poisoned", "exchange": "adasum"},
    "adasum skipping": {
        **NOISY, "kind": "poisoned", "exchange": "adasum", "non_finite": "skip",
        "optimizer": "adam",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]], str]:
    trained = TrainedCases(tmp_path_factory.mktemp("loop"), {SIZE: CASES})
    results = {name: trained.results(SIZE, name) for name in CASES}
    return trained.directory(SIZE, ""), results, trained.stderr[SIZE]


def test_the_best_evaluation_and_the_end_are_the_same_on_every_rank(runs: Any) -> None:
    """After step t the weight is -t/10, and the test loss (0.42 - t/10)², least at step 4."""
    directory, results = runs[0] / "valley", runs[1]["valley"]
    for result in results:
        assert (result["steps"], result["epochs"], result["ended"]) == (10, 3, "early stop")
        value = pytest.approx(0.02**2)
        best = {"name": "loss", "value": value, "epoch": 4 / 3, "step": 4, "since": 3}
        assert result["best"] == best
        assert result["final"] == {"loss": pytest.approx(0.58**2)}
    assert results[0]["saves"] == [2, 4, 8, 10]  # the better ones, each fourth, and the last
    assert [result["saves"] for result in results[1:]] == [[], []]
    goes_on = runs[1]["on"][0]
    assert (goes_on["steps"], goes_on["best"]["step"], goes_on["best"]["since"]) == (12, 4, 4)
    assert goes_on["saves"] == [12]
    kept = best_file(directory)
    assert kept is not None
    assert position_of(kept) == (1, 4)
    assert float(load_checkpoint(kept, "pt")["model"]["weight"]) == pytest.approx(-0.4)
    assert [position_of(path) for path in checkpoint_files(directory)] == [(4, 0), (3, 4)]


def test_evaluations_within_an_epoch_are_told(runs: Any) -> None:
    lines = metrics_of(runs[0] / "valley")
    tests = [line for line in lines if line["split"] == "test"]
    assert [line["step"] for line in tests] == [2, 4, 6, 8, 10, 12]
    assert [line["epoch"] for line in tests] == [0.666667, 1.333333, 2, 2.666667, 3.333333, 4]
    for line in tests:
        assert line["loss"] == pytest.approx((0.42 - line["step"] / 10) ** 2)
    trained = [line for line in lines if line["split"] == "train"]
    # A step's loss is the weight before it.
    assert [(line["step"], line["epoch"]) for line in trained] == [(3, 1), (6, 2), (9, 3), (12, 4)]
    means = [-0.1 * (3 * epoch - 2) for epoch in (1, 2, 3, 4)]
    assert [line["loss"] for line in trained] == pytest.approx(means)
    times = [line["seconds"] for line in lines]
    assert times == sorted(times)


def require_restored(results: dict[str, list[Any]], directory: Path) -> None:
    """Three steps an epoch, and the best evaluation after the fourth; that of averages later."""
    for name, epochs, best, weight in (
        *(
            ("restoring", 3, 4, -0.4),
            ("restoring on", 4, 4, -0.4),
            ("restoring elsewhere", 5, 4, -0.4),
            ("restoring shared", 3, 4, -0.4),
        ),
        (
            "restoring averages",
            3,
            6,
            sum(-step / 10 / 2 ** (7 - step) for step in range(2, 7)) - 0.1 / 32,
        ),
    ):
        for result in results[name]:
            assert (result["steps"], result["ended"]) == (3 * epochs, "epochs")
            assert result["best"]["step"] == best
            assert result["final"] == {"loss": pytest.approx((weight + 0.42) ** 2)}
            assert len(set(result["weights_sha256"])) == 1
        folder = directory / name.removesuffix(" on")
        kept = best_file(directory / "restoring" if name.endswith("elsewhere") else folder)
        newest = checkpoint_files(folder)[0]
        assert kept is not None
        found, restored = (
            load_checkpoint(path, "pt")["model"]["weight"] for path in (newest, kept)
        )
        assert float(found) == float(restored) == pytest.approx(-best / 10)


def test_the_best_weights_are_restored(runs: Any) -> None:
    require_restored(runs[1], runs[0])
    for result in runs[1]["untested"]:
        assert result["failed"] == "RestoreBestWeights needs a recipe with test samples"


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_best_weights_are_restored_on_more_or_fewer_ranks(size: int, tmp_path: Path) -> None:
    trained = TrainedCases(tmp_path, {size: RESTORING})
    results = {name: trained.results(size, name) for name in RESTORING}
    require_restored(results, trained.directory(size, ""))


def test_callbacks_note_rates(runs: Any) -> None:
    """A milestone after epoch 1 of three steps."""
    rates = [0.1, 0.1, 0.1, 0.01, 0.01, 0.01]
    for result in runs[1]["monitored"]:
        (steps, by_step), (ends, by_epoch) = result["seen"]
        assert (steps, ends) == ([1, 2, 3, 4, 5, 6], [3, 6])
        assert set(by_step) == set(by_epoch) == {"lr/pg1", "lr/pg2"}
        for number in (1, 2):
            assert by_step[f"lr/pg{number}"] == pytest.approx([number * rate for rate in rates])
            assert by_epoch[f"lr/pg{number}"] == by_step[f"lr/pg{number}"][2::3]
    first, *others = runs[1]["noting"]
    assert first["seen"] == []  # it has no callback
    weights = [0, -0.1, -0.2, -0.3, -0.31, -0.32, -0.33]
    ends = {3: (1, -0.1, (0.42 - 0.2) ** 2), 6: (2, -0.31, (0.42 - 0.33) ** 2)}
    expected: list[Any] = [["begin", 1, 0]]
    for step in range(1, 7):
        epoch, rate = (1, 0.1) if step <= 3 else (2, 0.01)
        expected.append([epoch, step, rate, weights[step - 1]])
        expected += [["end", *ends[step]]] if step in ends else []
    for result in others:
        assert len(result["seen"]) == len(expected)
        for line, wanted in zip(result["seen"], expected, strict=True):
            assert line == pytest.approx(wanted)


def test_a_dry_run_leaves_nothing_and_overfitting_repeats_the_first_batches(runs: Any) -> None:
    first = sorted(epoch_permutation(100, COMMON["seed"], 0)[:24].tolist())
    for name, epochs in (("dry", 1), ("overfit", 3)):
        results = runs[1][name]
        assert results[0]["steps"] == 2 * epochs
        trained = [number for result in results for number in result["seen"]["train"]]
        assert sorted(trained) == sorted(first * epochs)
        tested = {number for result in results for number in result["seen"]["test"]}
        assert tested == (set(first) if name == "overfit" else set(range(100, 105)))
        assert (runs[0] / name).exists() == (name == "overfit")


def test_a_callback_of_one_rank_stops_or_fails_all_in_the_same_step(runs: Any) -> None:
    for result in runs[1]["stopping"]:
        assert (result["steps"], result["ended"]) == (5, "callback of rank 1")
    for result in runs[1]["failing"]:
        start, _, reason = result["failed"].partition("train_recipes.py:")
        assert start.startswith("rank 2: callback failed at /")
        error = "hvdtrain.errors.UnsupportedError: as told"
        assert reason.partition(" ")[2] == f"in on_train_batch_end: {error}"
    for result in runs[1]["uncalled"]:
        assert "derived from hvdtrain.train.Callback" in result["refused"]


def test_checkpoints_by_the_clock(runs: Any) -> None:
    saves = runs[1]["timed"][0]["saves"]
    assert saves == sorted(set(saves))
    assert saves[-1] == 27
    assert len(saves) >= 3
    places = [divmod(step, 9) for step in saves[-2:]]
    expected = [(epoch, 12 * step) for epoch, step in reversed(places)]
    directory = runs[0] / "timed"
    assert [position_of(path) for path in checkpoint_files(directory)] == expected
    tests = [line["step"] for line in metrics_of(directory) if line["split"] == "test"]
    assert tests
    assert tests[-1] <= 27


def test_a_rank_whose_weights_moved_is_named(runs: Any) -> None:
    """Rank 1 moves one by 1e-6 after step 3; the ranks are compared after step 5."""
    for result in runs[1]["drifting"]:
        assert result["failed"] == (
            "step 5: weight 'model.0.weight' on rank 1 is not that of the other 2 ranks "
            f"(1 of {result['failed'].split()[-3]} checksums differ)"
        )


def poisoned_step(epoch: int) -> tuple[int, int]:
    order = epoch_permutation(100, COMMON["seed"], epoch).tolist()
    step, place = divmod(order.index(POISON), 12)
    size = min(12, 100 - 12 * step)
    return step, next(rank for rank in range(SIZE) if place < (rank + 1) * size // SIZE)


def test_epochs_are_divided_by_the_ranks(runs: Any) -> None:
    for result in runs[1]["divided"]:
        assert (result["steps"], result["epochs"], result["ended"]) == (18, 2, "epochs")


def test_sparse_momenta_are_refused_before_the_first_step(runs: Any) -> None:
    for result in runs[1]["embedded"]:
        assert result["refused"].startswith("gradients of layer '0' are sparse: ")


def test_a_sample_that_is_no_number_stops_the_run(runs: Any) -> None:
    step, rank = poisoned_step(0)
    for result in runs[1]["poisoned"]:
        assert result["failed"].startswith(f"step {step + 1}: the loss is nan on rank {rank}. ")
        assert "--non-finite skip" in result["failed"]
    assert not (runs[0] / "poisoned" / "summary.json").exists()


def test_or_is_left_out_and_told(runs: Any) -> None:
    for result in runs[1]["skipping"]:
        assert result["steps"] == 18
        assert np.isfinite(result["final"]["loss"])
    told = [line for line in runs[2].splitlines() if "the step is left out" in line]
    expected = [
        (9 * epoch + step + 1, rank) for epoch in (0, 1) for step, rank in [poisoned_step(epoch)]
    ]
    assert told == [
        f"hvdtrain: step {step}: the loss is nan on rank {rank}; the step is left out"
        for step, rank in expected
    ]
    directory = runs[0] / "skipping"
    lines = [line for line in metrics_of(directory) if line["split"] == "train"]
    assert [line["step"] for line in lines] == [9, 18]
    assert len(set(summary_of(directory)["weights_sha256"])) == 1
    content = load_checkpoint(checkpoint_files(directory)[0], "pt")
    assert all(tensor.isfinite().all() for tensor in content["model"].values())
    # Adam has not counted the steps that were left out.
    assert {int(state["step"]) for state in content["optimizer"]["state"].values()} == {16}


def test_weights_are_exchanged_after_steps_on_the_gradients_of_each_rank(runs: Any) -> None:
    """The ranks' weights are compared after each step; Adam's state may differ."""
    for result in runs[1]["adasum"]:
        assert result["exchange"] == "adasum:warmup=2"
        assert (result["steps"], len(set(result["weights_sha256"]))) == (18, 1)


def test_local_weights_are_averaged_before_they_are_evaluated_and_saved(runs: Any) -> None:
    """Another run evaluates what the first one has saved, and trains no further."""
    first, again = runs[1]["flushed"], runs[1]["flushed again"]
    assert len({digest for result in first for digest in result["weights_sha256"]}) == 1
    assert again[0]["final"] == first[0]["final"]
    assert again[0]["weights_sha256"] == first[0]["weights_sha256"]
    tests = [line["step"] for line in metrics_of(runs[0] / "flushed") if line["split"] == "test"]
    assert tests == [4, 8, 12, 16, 18]


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_with_the_same_bits(runs: Any, name: str) -> None:
    whole, stopped, goes_on = (runs[1][f"{name}{part}"] for part in ("", " stopped", " on"))
    assert stopped[0]["newest"].startswith("checkpoint-0000+72-")
    for result in goes_on:
        assert result["weights_sha256"] == whole[0]["weights_sha256"]
    assert len(set(goes_on[0]["weights_sha256"])) == 1


def test_what_is_measured_predicted_and_chosen_is_told_once(runs: Any) -> None:
    """Of two that choose, one is quiet; the other is stopped, and the next keeps its choice."""
    start = "hvdtrain: exchange auto: "
    lines = [line for line in runs[2].splitlines() if line.startswith(start)]
    told = [line.removeprefix(start).partition(" ")[0] for line in lines]
    assert told.count("chosen:") == 1, lines


def test_what_an_exchange_cannot_carry_over_is_told(runs: Any, tmp_path: Path) -> None:
    """Another exchange, and another number of ranks, go on from the checkpoint of three."""
    assert runs[1]["another"][0]["steps"] == 18
    begins = [
        line for line in runs[2].splitlines() if "from the beginning" in line or "is reset" in line
    ]
    assert len(begins) == 1
    assert begins[0].startswith("hvdtrain: the checkpoint was made with exchange 'onebit after 2 ")
    assert begins[0].endswith("': exchange 'local:steps=2,state=keep' starts from the beginning")
    cases = []
    for name in ("onebit", "blocks"):
        shutil.copytree(runs[0] / name, tmp_path / name)
        cases.append({**RESUMED[name], "epochs": 3, "resume": "auto", "out": str(tmp_path / name)})
    done = run_ranks(WORKER, 2, args=[json.dumps(cases)], warm="torch")
    for results in done.results:
        assert [result["steps"] for result in results] == [27, 27]
        assert all(len(set(result["weights_sha256"])) == 1 for result in results)
    ranks = "hvdtrain: the checkpoint is one of 3 ranks, and this run has 2: "
    told = [line.removeprefix(ranks) for line in done.stderr.splitlines() if ranks in line]
    assert [line.partition(" of exchange")[0] for line in told] == [
        "each rank's private state",
        "all ranks continue with the optimizer state of rank 0",
    ]


def test_a_rank_without_a_finite_gradient_takes_part_in_the_exchange(runs: Any) -> None:
    _, rank = poisoned_step(0)
    for result in runs[1]["adasum poisoned"]:
        assert result["failed"].startswith(
            f"until step 9: 1 update left out on rank {rank}, where the gradient of the rank was "
            "not finite. "
        )
    for result in runs[1]["adasum skipping"]:
        assert result["steps"] == 18
        assert np.isfinite(result["final"]["loss"])
        assert len(set(result["weights_sha256"])) == 1
    told = [line for line in runs[2].splitlines() if " left out on " in line]
    assert [line.partition(" where")[0] for line in told] == [
        f"hvdtrain: until step {9 * epoch + 9}: 1 update left out on rank "
        f"{poisoned_step(epoch)[1]},"
        for epoch in (0, 1)
    ]
