"""`hvdtrain train`: train a recipe on all ranks."""

from __future__ import annotations

import signal
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from hvdtrain.train.options import (
    BACKENDS,
    DEFAULT_BATCH_SIZE,
    DEFAULT_LR,
    DEVICES,
    DTYPES,
    ENGINES,
    FRAMEWORKS,
    OPTIMIZERS,
    RECIPES,
    RUNS,
    SGD_MOMENTUM,
    TrainOptions,
)
from hvdtrain.train.schedule import SCALINGS

__all__ = ["command"]

_DEFAULTS = {option.name: option.default for option in fields(TrainOptions)}
_LR_TEXT = ", ".join(f"{name}: {rate}" for name, rate in DEFAULT_LR.items())


def _choice(names: tuple[str, ...]) -> str:
    return f"[{'|'.join(names)}]"


def _option(flag: str, text: str, **settings: Any) -> Any:
    """Declare an option whose default is that of TrainOptions, and show that one in the help."""
    default = _DEFAULTS[flag.removeprefix("--").replace("-", "_")]
    shown = default is not None and default is not False
    return click.option(flag, default=default, show_default=shown, help=text, **settings)


@click.command()
@click.argument("recipe", default="digits", metavar=_choice(RECIPES))
@_option("--framework", "Which framework trains.", metavar=_choice(FRAMEWORKS))
@_option("--backend", "Of keras.  [default: as KERAS_BACKEND says]", metavar=_choice(BACKENDS))
@_option("--engine", "What moves the gradients.", metavar=_choice(ENGINES))
@_option("--epochs", "Passes over the training data.", type=int)
@_option("--batch-size", f"Samples per rank and step.  [default: {DEFAULT_BATCH_SIZE}]", type=int)
@_option("--global-batch-size", "Samples of all ranks per step, instead.", type=int)
@_option("--lr", f"Learning rate for one rank.  [default: {_LR_TEXT}]", type=float)
@_option("--lr-scaling", "How it grows with the ranks.", metavar=_choice(SCALINGS))
@_option("--warmup-epochs", "Epochs from the rate for one rank to the scaled one.", type=float)
@_option("--optimizer", f"sgd has momentum {SGD_MOMENTUM}.", metavar=_choice(OPTIMIZERS))
@_option("--dtype", "Type of weights and arithmetic.", metavar=_choice(DTYPES))
@_option("--seed", "Of the first weights and the order of the samples.", type=int)
@_option("--out", f"For results.  [default: a new one in {RUNS}/]", type=Path, metavar="DIR")
@_option(
    "--resume", "Go on: never, from the newest in --out, or PATH.", metavar="[never|auto|PATH]"
)
@_option("--virtual-shards", "Same bits on 1, 2, 4 ... ranks: docs/numerics.md.", type=int)
@_option("--device", "auto: a GPU where there is one.", metavar=_choice(DEVICES))
@_option("--gpu-map", "Which GPU each local rank takes, as 3,2,1,0.", metavar="I,J,...")
@_option("--share-gpus", "Ranks may take the same GPU.", is_flag=True)
@_option("--quiet", "Print nothing but errors.", is_flag=True)
def command(**options: Any) -> None:
    """Train a recipe on all ranks; without mpirun, on one."""
    asked = TrainOptions(**options)
    # It would end a rank that has not come as far as to wait for it: train() lets it through.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    from hvdtrain.train.session import train

    train(asked)
