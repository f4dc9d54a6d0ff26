"""A recipe whose ranks kill or disturb themselves at moments that a variable names."""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from disturbances import Killed
from newcomers import await_newcomer
from torch import nn

from hvdtrain.data.dataset import Samples
from hvdtrain.train import session
from hvdtrain.train.metrics import Accuracy
from hvdtrain.train.recipe import Recipe

KILLED = Killed()


class Model(nn.Sequential):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        KILLED.at("forward" if self.training else "evaluation")
        if self.training:
            await_newcomer(int(os.environ.get("AWAIT_RANKS", "0")))
        outputs: torch.Tensor = super().forward(inputs)
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: KILLED.at("backward"))
        return outputs


class Adam(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        KILLED.at("update")
        return result


def samples(rng: np.random.Generator, count: int) -> Samples:
    inputs = rng.standard_normal((count, 16), dtype=np.float32)
    return Samples(inputs, (inputs[:, :5].sum(1) > 0).astype(np.int64))


def with_options() -> Recipe:
    return replace(recipe(), optimizer=None)


def note_checkpoints() -> None:
    replace = os.replace

    def noting(source: Any, target: Any) -> None:
        if ".safetensors" in str(target):
            KILLED.at("checkpoint")
        replace(source, target)

    os.replace = noting  # type: ignore[assignment]


def note_in_session(moment: str, name: str) -> None:
    function = getattr(session, name)

    def noting(*arguments: Any) -> None:
        KILLED.at(moment)
        function(*arguments)

    setattr(session, name, noting)


def recipe() -> Recipe:
    # This file is read again after each recovery.
    number = os.environ["RECIPES"] = str(int(os.environ.get("RECIPES", "0")) + 1)
    if number == "1":
        note_checkpoints()
        # This rank has written all results, and has yet to agree that all ranks have.
        note_in_session("end", "require_all")
        note_in_session("log", "write_environment")  # on rank 0: changes of ranks are noted
    rng = np.random.default_rng(7)
    model = Model(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    return Recipe(
        model=model,
        train=samples(rng, 100),
        test=samples(rng, 40),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters, lr: Adam(parameters, lr=lr),
        metrics={"accuracy": Accuracy()},
        most_threads=1,
    )
