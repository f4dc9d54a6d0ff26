"""A recipe whose ranks kill or disturb themselves at moments that a variable names."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from disturbances import disturb
from torch import nn

from hvdtrain.core import context
from hvdtrain.data.dataset import Samples
from hvdtrain.train import session
from hvdtrain.train.metrics import Accuracy
from hvdtrain.train.recipes.recipe import Recipe

JOIN_SECONDS = 240

# Moments that every rank reaches in each step without waiting for a rank that has come to them.
OF_STEPS = ("forward", "backward", "before_update", "update")


class Killed:
    """Counts moments of this process, and disturbs it: KILLS="RANK:NUMBER:MOMENT[:WAY] ...".

    RANK is "new" for processes that have joined. WAY is one of disturb(), "kill" by default. Where
    TOGETHER names a folder, a rank is killed in a step when all ranks have come to that moment:
    else the end of one that is ahead may break off the step before on the others. That is left to
    chance where the world has the size again that another one had.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        joined = "hvdtrain.engines.mpi.newcomer" in sys.orig_argv
        own = "new" if joined else os.environ.get("OMPI_COMM_WORLD_RANK", "0")
        again = os.environ.get("HVDTRAIN_RESTARTS", "0") != "0"
        kills = [kill.split(":") for kill in os.environ.get("KILLS", "").split() if not again]
        self.ways = {
            (int(number), moment): way[0] if way else "kill"
            for rank, number, moment, *way in kills
            if rank == own
        }
        self.folder = os.environ.get("TOGETHER", "")
        self.noted = {(int(number), moment) for _, number, moment, *_ in kills}

    def at(self, moment: str) -> None:
        self.counts[moment] = self.counts.get(moment, 0) + 1
        here = self.counts[moment], moment
        way = self.ways.get(here)
        if self.folder and here in self.noted:
            self._meet(f"{here[0]} {moment}", moment in OF_STEPS, way == "kill")
        if way is not None:
            disturb(way)

    def _meet(self, moment: str, waits: bool, ends: bool) -> None:
        """Tell that this rank has come to a moment; one that ends may wait until all have."""
        world = context.current().topology
        names = [f"{rank} of {world.size}" for rank in range(world.size)]
        Path(self.folder, f"{moment} {names[world.rank]}").touch()
        deadline = time.monotonic() + JOIN_SECONDS
        # Without one that has ended, others may not come to it.
        while ends and waits and not self._told("end", names, any):
            if self._told(moment, names, all):
                break
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if ends:
            Path(self.folder, f"end {names[world.rank]}").touch()

    def _told(
        self, what: str, names: Sequence[str], these: Callable[[Iterable[bool]], bool]
    ) -> bool:
        return these(Path(self.folder, f"{what} {name}").exists() for name in names)


KILLED = Killed()


def await_newcomer() -> None:
    """Have rank 0 wait, where there are fewer ranks than AWAIT_RANKS, until one can join."""
    wanted = int(os.environ.get("AWAIT_RANKS", "0"))
    deadline = time.monotonic() + JOIN_SECONDS
    if not wanted or context.current().topology.rank:
        return
    while context.current().topology.size < wanted and not context.newcomer_waits():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Model(nn.Sequential):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        KILLED.at("forward" if self.training else "evaluation")
        if self.training:
            await_newcomer()
        outputs: torch.Tensor = super().forward(inputs)
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: KILLED.at("backward"))
        return outputs


class Adam(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        KILLED.at("before_update")
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
    # This file is read anew after each recovery.
    number = os.environ["RECIPES"] = str(int(os.environ.get("RECIPES", "0")) + 1)
    KILLED.at(f"recipe{number}")
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
