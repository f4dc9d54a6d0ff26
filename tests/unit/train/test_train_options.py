"""Options that make no sense are refused by name, before anything starts."""

import re
from pathlib import Path
from typing import Any

import pytest
from refusing import refused

from hvdtrain.errors import UsageError
from hvdtrain.train import recipes
from hvdtrain.train.options import RECIPES, TrainOptions

NAN, INFINITY = float("nan"), float("inf")
# Values that an option refuses whatever the others are, by kind, choice and bound.
WRONG: dict[str, list[Any]] = {
    "framework": ["jax"], "engine": ["smoke"], "lr_scaling": ["cubic"], "optimizer": ["lbfgs"],
    "dtype": ["float8"], "device": ["tpu"], "schedule": ["linear"], "amp": ["fp8", None],
    "non_finite": ["ignore"], "epochs": [0, 1.5, True], "batch_size": [0, -3],
    "global_batch_size": [0], "lr": [0.0, -0.1, NAN, INFINITY, "0.1"],
    "warmup_epochs": [-1.0, NAN], "seed": [-1, 2**63], "accumulate": [0], "workers": [-1],
    "momentum": [1.0], "weight_decay": [-0.1], "clip_norm": [0.0], "ema": [1.0, NAN],
    "compile": [" "], "checkpoint_every": ["often"], "evaluate_every": ["0 steps"],
    "keep_checkpoints": [0], "early_stop": [0], "best": [""], "log_every": [0],
    "watch_every": [-1], "quiet": [1], "out": ["runs/x"], "set": ["width=1"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "values"), WRONG.items(), ids=WRONG)
def test_a_value_is_refused_by_the_name_of_its_option(name: str, values: list[Any]) -> None:
    for value in values:
        with refused(str(value), start=f"--{name.replace('_', '-')} must "):
            TrainOptions(**{name: value})


BY_SHARDS: dict[str, Any] = {"virtual_shards": 2, "global_batch_size": 8}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipe": "digit"}, ["recipe", "'digit'", "digits"]),
        ({"recipe": "my.py:"}, ["recipe", "''", "my.py:recipe"]),
        ({"recipe": "my.py:a-b"}, ["recipe", "'a-b'", "no name of a function"]),
        ({"recipe": "cifar10", "framework": "keras"}, ["cifar10", "torch only", "digits, mnist"]),
        (
            {"framework": "tensorflow"},
            ["--framework tensorflow was removed", "--framework keras --backend tensorflow"],
        ),
        ({"backend": "theano", "framework": "keras"}, ["--backend", "tensorflow, torch, jax"]),
        ({"backend": "jax"}, ["--backend jax", "--framework keras"]),
        ({"batch_size": 8, "global_batch_size": 8}, ["--batch-size", "--global-batch-size"]),
        ({**BY_SHARDS, "virtual_shards": 0}, ["--virtual-shards", "0"]),
        ({"virtual_shards": 8}, ["--virtual-shards", "--global-batch-size"]),
        ({"resume": "auto"}, ["--resume auto", "--out"]),
        ({"strategy": "gossip"}, ["--strategy", "allreduce or ps", "'gossip'"]),
        ({"strategy": "ps:servers=0"}, ["--strategy", "servers must be at least 1, got 0"]),
        ({"strategy": "ps:servers=two"}, ["servers must be a whole number, got 'two'"]),
        ({"strategy": "ps:mode=both"}, ["--strategy", "mode must be async or sync, got 'both'"]),
        ({"strategy": "ps:speed=1"}, ["key=value", "servers, mode, staleness, backup"]),
        ({"strategy": "ps:servers=1,servers=2"}, ["servers is given twice"]),
        ({"strategy": "ps:backup=1"}, ["backup is no option of mode=async: leave it out"]),
        ({"strategy": "ps:mode=sync,servers=2,backup=1"}, ["backup needs servers=1"]),
        ({"strategy": "ps", "optimizer": "lamb"}, ["--optimizer lamb", "--strategy ps", "norms"]),
        ({"strategy": "ps", "clip_norm": 1.0}, ["--clip-norm 1.0", "--strategy ps"]),
        ({"strategy": "ps", "engine": "gloo"}, ["--engine gloo", "--strategy ps", "only mpi"]),
        ({"strategy": "ps", "exchange": "adasum"}, ["--exchange adasum", "--strategy ps"]),
        ({**BY_SHARDS, "accumulate": 2}, ["--virtual-shards", "--accumulate 2", "exclude"]),
        ({"momentum": 0.5, "optimizer": "adamw"}, ["--momentum", "sgd or lars", "adamw"]),
        ({"schedule": "step"}, ["--schedule step", "--milestones"]),
        ({"milestones": "3,6"}, ["--milestones", "--schedule step", "constant"]),
        ({"schedule": "step", "milestones": "6,3"}, ["--milestones", "'6,3'"]),
        ({"schedule": "cosine", "decay": 0.5}, ["--decay", "--schedule step", "cosine"]),
        ({"schedule": "cosine", "power": 2.0}, ["--power", "--schedule polynomial", "cosine"]),
        ({"final_lr": 0.1}, ["--final-lr", "--schedule cosine or polynomial", "constant"]),
        ({"schedule": "cosine", "final_lr": -0.1}, ["--final-lr", "0 or more", "-0.1"]),
        ({"exchange": "averag"}, ["--exchange 'averag'", "one of average, half, adasum"]),
        ({**BY_SHARDS, "exchange": "adasum"}, ["--virtual-shards 2 does not go with", "adasum"]),
        ({"shard_optimizer": True, "exchange": "adasum"}, ["--shard-optimizer does not go with"]),
        ({"shard_optimizer": True, "strategy": "ps"}, ["--shard-optimizer", "--strategy ps"]),
        ({**BY_SHARDS, "shard_optimizer": True}, ["--shard-optimizer and --virtual-shards exclu"]),
        ({"exchange": "adasum", "amp": "fp16"}, ["--amp fp16", "--exchange adasum", "bf16"]),
        ({"exchange": "adasum", "ema": 0.9}, ["--ema 0.9", "--exchange adasum"]),
        ({"amp": "bf16", "dtype": "float64"}, ["--amp bf16", "--dtype float32", "float64"]),
        ({"track": "mlflow,excel"}, ["--track", "'excel'", "tensorboard, mlflow, wandb"]),
        ({"tracking_uri": "http://h", "track": "wandb"}, ["--tracking-uri", "--track mlflow"]),
        ({"run_name": "r", "track": "tensorboard"}, ["--run-name", "--track mlflow or wandb"]),
    ],
)
def test_refused(options: dict[str, Any], words: list[str]) -> None:
    with refused(*words):
        TrainOptions(**options)


TORCH_ONLY: list[dict[str, Any]] = [
    {"optimizer": "lars"}, {"amp": "fp16"}, {"accumulate": 2}, {"ema": 0.9},
    {"compile": "inductor"}, {"workers": 1}, {"non_finite": "skip"}, BY_SHARDS, {"engine": "nccl"},
]  # fmt: skip


@pytest.mark.parametrize("asked", TORCH_ONLY, ids=lambda asked: next(iter(asked)))
def test_what_goes_with_torch_only(asked: dict[str, Any]) -> None:
    name = next(iter(asked))
    TrainOptions(**asked)
    said = f"--{name.replace('_', '-')} {asked[name]} goes with --framework torch only"
    with refused(start=f"{said}, got --framework keras"):
        TrainOptions(**asked, framework="keras")


def test_every_built_in_recipe_is_named() -> None:
    of_torch, of_keras = (
        Path(recipes.__path__[0], f"{framework}_recipes.py").read_text()
        for framework in ("torch", "keras")
    )
    found = re.findall(r"^def ([a-z]\w*)\([^)]*\) -> Recipe:|^(\w+) = _photographs", of_torch, re.M)
    assert {"".join(names) for names in found} == set(RECIPES)
    for name in RECIPES:
        if re.search(rf"^def {name}\b", of_keras, re.MULTILINE):
            TrainOptions(recipe=name, framework="keras")
        else:
            with pytest.raises(UsageError, match="torch only"):
                TrainOptions(recipe=name, framework="keras")


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
