"""Options that make no sense are refused by name, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.train.options import TrainOptions


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipe": "digit"}, ["recipe", "'digit'", "digits"]),
        ({"framework": "jax"}, ["--framework", "'jax'", "torch"]),
        ({"backend": "theano", "framework": "keras"}, ["--backend", "tensorflow, torch, jax"]),
        ({"backend": "jax"}, ["--backend jax", "--framework keras"]),
        ({"engine": "nccl", "framework": "keras"}, ["--engine nccl", "--framework torch"]),
        (
            {"virtual_shards": 2, "global_batch_size": 8, "framework": "tensorflow"},
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
    ],
)
def test_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as refusal:
        TrainOptions(**options)
    message = str(refusal.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_batch_sizes() -> None:
    assert TrainOptions(batch_size=8).samples_per_step(4) == 32
    assert TrainOptions(global_batch_size=50).samples_per_step(4) == 50
    assert TrainOptions().samples_per_step(3) == 3 * TrainOptions().samples_per_step(1)


def test_learning_rates() -> None:
    assert TrainOptions(lr=0.1).scaled_lr(4) == pytest.approx(0.4)
    assert TrainOptions(lr=0.1, lr_scaling="none").scaled_lr(4) == 0.1
    assert TrainOptions(optimizer="adam").base_lr < TrainOptions(optimizer="sgd").base_lr


def test_resume_from_a_path_needs_no_directory() -> None:
    assert TrainOptions(resume="some.pt").out is None
    assert TrainOptions(resume="auto", out=Path("here")).resume == "auto"
