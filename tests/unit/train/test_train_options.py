"""Options that make no sense are refused by name, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.train.optimizers.schedule import OPTIMIZERS
from hvdtrain.train.options import DEFAULT_LR, RECIPES, TrainOptions
from hvdtrain.train.recipes import builtin as recipes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipe": "digit"}, ["recipe", "'digit'", "digits"]),
        ({"framework": "jax"}, ["--framework", "'jax'", "torch"]),
        (
            {"framework": "tensorflow"},
            ["--framework tensorflow was removed", "--framework keras --backend tensorflow"],
        ),
        ({"backend": "theano", "framework": "keras"}, ["--backend", "tensorflow, torch, jax"]),
        ({"backend": "jax"}, ["--backend jax", "--framework keras"]),
        ({"engine": "nccl", "framework": "keras"}, ["--engine nccl", "--framework torch"]),
        (
            {"virtual_shards": 2, "global_batch_size": 8, "framework": "keras"},
            ["--virtual-shards", "--framework torch"],
        ),
        ({"engine": "smoke"}, ["--engine", "'smoke'", "auto", "mpi", "local"]),
        ({"lr_scaling": "cubic"}, ["--lr-scaling", "linear", "sqrt", "none"]),
        ({"optimizer": "lbfgs"}, ["--optimizer", "sgd", "adam"]),
        ({"dtype": "float8"}, ["--dtype", "float32", "float64"]),
        ({"device": "tpu"}, ["--device", "auto", "cpu", "cuda"]),
        ({"epochs": 0}, ["--epochs", "0"]),
        ({"batch_size": 0}, ["--batch-size", "0"]),
        ({"batch_size": -3}, ["--batch-size", "-3"]),
        ({"global_batch_size": 0}, ["--global-batch-size", "0"]),
        ({"batch_size": 8, "global_batch_size": 8}, ["--batch-size", "--global-batch-size"]),
        ({"lr": 0.0}, ["--lr", "0.0"]),
        ({"lr": -0.1}, ["--lr", "-0.1"]),
        ({"lr": float("nan")}, ["--lr", "nan"]),
        ({"lr": float("inf")}, ["--lr", "inf"]),
        ({"warmup_epochs": -1.0}, ["--warmup-epochs", "-1.0"]),
        ({"warmup_epochs": float("nan")}, ["--warmup-epochs", "nan"]),
        ({"seed": -1}, ["--seed", "-1"]),
        ({"seed": 2**63}, ["--seed"]),
        ({"virtual_shards": 0, "global_batch_size": 8}, ["--virtual-shards", "0"]),
        ({"virtual_shards": 8}, ["--virtual-shards", "--global-batch-size"]),
        ({"resume": "auto"}, ["--resume auto", "--out"]),
        ({"recipe": "my.py:"}, ["recipe", "''", "my.py:recipe"]),
        ({"recipe": "my.py:a-b"}, ["recipe", "'a-b'", "no name of a function"]),
        ({"recipe": "cifar10", "framework": "keras"}, ["cifar10", "torch only", "digits, mnist"]),
        ({"strategy": "gossip"}, ["--strategy", "allreduce or ps", "'gossip'"]),
        ({"strategy": "ps:servers=0"}, ["--strategy", "servers must be at least 1, got 0"]),
        ({"strategy": "ps:servers=two"}, ["servers must be a whole number, got 'two'"]),
        ({"strategy": "ps:mode=both"}, ["--strategy", "mode must be async or sync, got 'both'"]),
        ({"strategy": "ps:speed=1"}, ["key=value", "servers, mode, staleness, backup"]),
        ({"strategy": "ps:servers=1,servers=2"}, ["servers is given twice"]),
        ({"strategy": "ps:backup=1"}, ["backup is no option of mode=async: leave it out"]),
        ({"strategy": "ps:mode=sync,staleness=1"}, ["staleness is no option of mode=sync"]),
        ({"strategy": "ps:mode=sync,servers=2,backup=1"}, ["backup needs servers=1"]),
        ({"strategy": "ps", "optimizer": "lamb"}, ["--optimizer lamb", "--strategy ps", "norms"]),
        ({"strategy": "ps", "clip_norm": 1.0}, ["--clip-norm 1.0", "--strategy ps"]),
        ({"strategy": "ps", "engine": "gloo"}, ["--engine gloo", "--strategy ps", "only mpi"]),
        ({"strategy": "ps", "exchange": "adasum"}, ["--exchange adasum", "--strategy ps"]),
        ({"accumulate": 0}, ["--accumulate", "at least 1", "0"]),
        (
            {"accumulate": 2, "virtual_shards": 2, "global_batch_size": 8},
            ["--virtual-shards", "--accumulate 2", "exclude each other"],
        ),
        ({"workers": -1}, ["--workers", "at least 0", "-1"]),
        ({"momentum": 1.0}, ["--momentum", "less than 1", "1.0"]),
        ({"momentum": 0.5, "optimizer": "adamw"}, ["--momentum", "sgd or lars", "adamw"]),
        ({"weight_decay": -0.1}, ["--weight-decay", "0 or more", "-0.1"]),
        ({"clip_norm": 0.0}, ["--clip-norm", "positive", "0.0"]),
        ({"ema": 1.0}, ["--ema", "less than 1", "1.0"]),
        ({"ema": float("nan")}, ["--ema", "nan"]),
        ({"schedule": "linear"}, ["--schedule", "'linear'", "constant, step, cosine, polynomial"]),
        ({"schedule": "step"}, ["--schedule step", "--milestones"]),
        ({"milestones": "3,6"}, ["--milestones", "--schedule step", "constant"]),
        ({"schedule": "step", "milestones": "6,3"}, ["--milestones", "'6,3'"]),
        ({"schedule": "step", "milestones": "3,3"}, ["--milestones", "'3,3'"]),
        ({"schedule": "step", "milestones": "x"}, ["--milestones", "'x'"]),
        ({"schedule": "cosine", "decay": 0.5}, ["--decay", "--schedule step", "cosine"]),
        ({"schedule": "cosine", "power": 2.0}, ["--power", "--schedule polynomial", "cosine"]),
        ({"final_lr": 0.1}, ["--final-lr", "--schedule cosine or polynomial", "constant"]),
        ({"schedule": "cosine", "final_lr": -0.1}, ["--final-lr", "0 or more", "-0.1"]),
        ({"exchange": "averag"}, ["--exchange 'averag'", "one of average, half, adasum"]),
        ({"exchange": "average:bits=1"}, ["--exchange 'average:bits=1'", "'bits=1'"]),
        (
            {"exchange": "adasum", "virtual_shards": 2, "global_batch_size": 8},
            ["--virtual-shards 2 does not go with --exchange adasum"],
        ),
        (
            {"shard_optimizer": True, "exchange": "adasum"},
            ["--shard-optimizer does not go with --exchange adasum"],
        ),
        ({"shard_optimizer": True, "strategy": "ps"}, ["--shard-optimizer", "--strategy ps"]),
        ({"shard_optimizer": True, "optimizer": "lamb"}, ["--shard-optimizer", "lamb"]),
        (
            {"shard_optimizer": True, "virtual_shards": 2, "global_batch_size": 8},
            ["--shard-optimizer and --virtual-shards exclude each other"],
        ),
        ({"exchange": "adasum", "amp": "fp16"}, ["--amp fp16", "--exchange adasum", "bf16"]),
        ({"exchange": "adasum", "ema": 0.9}, ["--ema 0.9", "--exchange adasum"]),
        ({"amp": "fp8"}, ["--amp", "none, bf16, fp16", "'fp8'"]),
        ({"amp": "bf16", "dtype": "float64"}, ["--amp bf16", "--dtype float32", "float64"]),
        ({"compile": " "}, ["--compile", "must not be empty"]),
        ({"checkpoint_every": "often"}, ["--checkpoint-every", "'often'", "10 minutes"]),
        ({"evaluate_every": "0 steps"}, ["--evaluate-every", "'0 steps'"]),
        ({"keep_checkpoints": 0}, ["--keep-checkpoints", "at least 1", "0"]),
        ({"early_stop": 0}, ["--early-stop", "at least 1", "0"]),
        ({"best": ""}, ["--best", "must not be empty"]),
        ({"log_every": 0}, ["--log-every", "at least 1", "0"]),
        ({"watch_every": -1}, ["--watch-every", "at least 0", "-1"]),
        ({"non_finite": "ignore"}, ["--non-finite", "stop, skip", "'ignore'"]),
        ({"track": "mlflow,excel"}, ["--track", "'excel'", "tensorboard, mlflow, wandb"]),
        ({"tracking_uri": "http://h", "track": "wandb"}, ["--tracking-uri", "--track mlflow"]),
        ({"experiment": "e"}, ["--experiment", "--track mlflow or wandb"]),
        ({"run_name": "r", "track": "tensorboard"}, ["--run-name", "--track mlflow or wandb"]),
        # What Python lets through must be of the declared type, too.
        ({"epochs": 1.5}, ["--epochs", "a whole number", "1.5"]),
        ({"epochs": True}, ["--epochs", "a whole number", "True"]),
        ({"lr": "0.1"}, ["--lr", "a number", "'0.1'"]),
        ({"quiet": 1}, ["--quiet", "true or false", "1"]),
        ({"out": "runs/x"}, ["--out", "a path", "'runs/x'"]),
        ({"amp": None}, ["--amp", "text", "None"]),
        ({"set": "width=1"}, ["--set", "names with values"]),
    ],
)
def test_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as refusal:
        TrainOptions(**options)
    message = str(refusal.value)
    assert "\n" not in message
    for word in words:
        assert word in message


TORCH_ONLY: list[dict[str, Any]] = [
    {"optimizer": "lars"},
    {"amp": "fp16"},
    {"accumulate": 2},
    {"ema": 0.9},
    {"compile": "inductor"},
    {"workers": 1},
    {"non_finite": "skip"},
    {"virtual_shards": 2, "global_batch_size": 8},
    {"engine": "nccl"},
]


@pytest.mark.parametrize("asked", TORCH_ONLY, ids=lambda asked: next(iter(asked)))
def test_what_goes_with_torch_only(asked: dict[str, Any]) -> None:
    name = next(iter(asked))
    TrainOptions(**asked)
    with pytest.raises(UsageError) as refusal:
        TrainOptions(**asked, framework="keras")
    said = f"--{name.replace('_', '-')} {asked[name]} goes with --framework torch only"
    assert str(refusal.value).startswith(f"{said}, got --framework keras")


def test_what_goes_with_every_framework() -> None:
    for optimizer in ("sgd", "adam", "adamw", "lamb"):
        TrainOptions(
            framework="keras",
            optimizer=optimizer,
            amp="bf16",
            clip_norm=1.0,
            schedule="polynomial",
            final_lr=0.001,
            early_stop=2,
        )


def test_every_built_in_recipe_is_named() -> None:
    folder = Path(recipes.__path__[0])
    texts = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    found = {name for name, text in texts.items() if "\ndef recipe(" in text}
    assert found == {*RECIPES, *(f"{name}_keras" for name in RECIPES if takes_keras(name))}
    assert DEFAULT_LR.keys() == set(OPTIMIZERS)


def takes_keras(recipe: str) -> bool:
    try:
        TrainOptions(recipe=recipe, framework="keras")
    except UsageError:
        return False
    return True


def test_where_a_recipe_is() -> None:
    assert TrainOptions(recipe="mnist").recipe_location.path is None
    for text, path, function in [
        ("my_recipe.py", "my_recipe.py", "recipe"),
        ("a b/my.py:other", "a b/my.py", "other"),
        ("x.py:y/z.py:f", "x.py:y/z.py", "f"),
    ]:
        options = TrainOptions(recipe=text, framework="keras")
        assert options.recipe_location.path == Path(path)
        assert options.recipe_location.function == function
        assert options.recipe_title == Path(path).stem


def test_batch_sizes() -> None:
    assert TrainOptions(batch_size=8).samples_per_step(4) == 32
    assert TrainOptions(global_batch_size=50).samples_per_step(4) == 50
    assert TrainOptions(batch_size=8, accumulate=3).samples_per_step(4) == 96
    assert TrainOptions(global_batch_size=50, accumulate=3).samples_per_step(4) == 50
    assert TrainOptions().samples_per_step(3) == 3 * TrainOptions().samples_per_step(1)


def test_a_quiet_run_does_not_tell_what_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    for quiet in (False, True):
        exchange = TrainOptions(
            recipe="digits", exchange="auto:warmup=2", quiet=quiet
        ).make_exchange()
        assert exchange is not None
        exchange.note_alone()
        assert (
            "chosen: average, because there is one rank" in capsys.readouterr().err
        ) is not quiet
