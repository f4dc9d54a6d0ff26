"""A recipe with a known result: a fully convolutional network on ItalyPowerDemand.

    pip install --no-deps aeon
    cd examples
    python -m hvdtrain run -np 2 -- train power_demand.py --config power_demand.yaml

Is the demand for power of a day, hour by hour, one of winter or of summer? aeon has a part of the
UCR archive, which divides the days into 67 to train on and 1,029 to test. The published accuracy of
this network is 0.961, with a standard deviation of 0.003: ten runs by Ismail Fawaz et al.
(doi:10.1007/s10618-019-00619-1), README.md of github.com/hfawaz/dl-4-tsc. Batch normalization takes
its statistics from all ranks: any number of them trains what one does with the same global batch.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from torch import nn

import hvdtrain.torch as hvd
from hvdtrain.data import Samples
from hvdtrain.errors import UsageError
from hvdtrain.train import Recipe
from hvdtrain.train.metrics import Accuracy


def read(split: str) -> Samples:
    package = find_spec("aeon")  # nothing of it is imported, which would need numba
    if package is None or package.origin is None:
        raise UsageError("ItalyPowerDemand comes with aeon: pip install --no-deps aeon")
    folder = Path(package.origin).parent / "datasets/data/ItalyPowerDemand"
    lines = (folder / f"ItalyPowerDemand_{split}.ts").read_text().splitlines()
    days = [line.replace(":", ",") for line in lines if line[:1] not in ("#", "@", "")]
    rows = np.loadtxt(days, np.float32, delimiter=",")
    return Samples(rows[:, None, :-1], rows[:, -1].astype(np.int64) - 1)


def block(inputs: int, outputs: int, width: int) -> list[nn.Module]:
    convolution = nn.Conv1d(inputs, outputs, width, padding="same")
    return [convolution, hvd.SyncBatchNorm(outputs), nn.ReLU()]


def recipe() -> Recipe:
    blocks = [*block(1, 128, 8), *block(128, 256, 5), *block(256, 128, 3)]
    return Recipe(
        model=nn.Sequential(*blocks, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, 2)),
        train=read("TRAIN"),
        test=read("TEST"),
        loss=nn.CrossEntropyLoss(),
        metrics={"accuracy": Accuracy()},
        classes=["October to March", "April to September"],
    )
