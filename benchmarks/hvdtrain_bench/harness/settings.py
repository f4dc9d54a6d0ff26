"""How much is measured: the usual amount, and a quick one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Self

__all__ = ["DEFAULT", "FITTED", "MODELS", "QUICK", "Settings", "estimated_seconds"]

MODELS = ("mlp", "transformer", "resnet50", "mnist-cnn")
# Those that are there for Keras.
FITTED = ("mlp", "mnist-cnn")

# What things took on two cores; only to tell a person how long to wait.
_START_SECONDS = 6.0
_WAYS, _STATES = 15, 10
_SECONDS_PER_BYTE = 3e-9
_STEP_SECONDS = {"mlp": 0.15, "transformer": 0.3, "resnet50": 0.25, "mnist-cnn": 0.08}
_TENSORFLOW_SECONDS, _FITS_SECONDS = 0.7, 8.0  # of one step, or fit, of all contenders
_CHECKPOINT_STEPS = 20  # while one is written, and without
_LOOP_SECONDS = {"digits": 1.0, "mlp": 4.0, "resnet": 8.0}  # an epoch of all contenders
_STEP_CONTENDERS = {"steps": 7, "profile": 2}

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Settings:
    """What a job of ranks measures.

    Attributes:
        repeats: turns of each contender; fewer than 8 cannot tell a difference from noise.
        seconds_per_turn: about how long a turn of a collective takes.
        sizes_bytes: of the tensors.
        models: of MODELS; models.py describes them.
        batches: samples per rank, as a factor of each model's own, for each case.
        steps_per_turn: training steps.
        idle_seconds: how long ranks are watched that have nothing to do.
        loops: models of loops.py.
    """

    repeats: int
    seconds_per_turn: float
    sizes_bytes: tuple[int, ...]
    models: tuple[str, ...]
    steps_per_turn: int
    idle_seconds: float
    batches: tuple[int, ...] = (1,)
    loops: tuple[str, ...] = ("digits", "mlp", "resnet")

    def to_json(self) -> str:
        """Write it on one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what to_json() wrote."""
        found = json.loads(text)
        lists = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
        return cls(**{**found, **lists})


# From 12 repeats on one outlier among them does not hide a difference (see statistics.py).
DEFAULT = Settings(
    repeats=12,
    seconds_per_turn=0.05,
    sizes_bytes=(
        *(_KIB * n for n in (1, 16, 64, 256)),
        *(_MIB * n for n in (1, 4, 16, 64, 256)),
    ),
    models=MODELS,
    steps_per_turn=2,
    idle_seconds=10.0,
)
QUICK = replace(
    DEFAULT,
    seconds_per_turn=0.01,
    sizes_bytes=(_KIB, _MIB * 4),
    models=("mnist-cnn",),
    loops=("digits",),
    steps_per_turn=1,
    idle_seconds=2.0,
)


def estimated_seconds(kind: str, settings: Settings) -> float:
    """Return about how long a job takes on two cores."""
    repeats = settings.repeats + 1
    if kind == "collectives":
        turns = (settings.seconds_per_turn + _SECONDS_PER_BYTE * n for n in settings.sizes_bytes)
        return _START_SECONDS + repeats * _WAYS * sum(turns)
    if kind.startswith("tensorflow"):
        return _START_SECONDS + repeats * (settings.steps_per_turn + 1) * _TENSORFLOW_SECONDS
    if kind.startswith("keras-"):
        return 2 * _START_SECONDS + repeats * settings.steps_per_turn * _FITS_SECONDS
    if kind == "idle":
        return _START_SECONDS + _STATES * settings.idle_seconds
    if kind == "checkpoint":
        steps = _CHECKPOINT_STEPS * sum(map(_STEP_SECONDS.__getitem__, settings.models))
        return _START_SECONDS + 2 * repeats * steps
    if kind == "loop":
        return _START_SECONDS + (repeats + 1) * sum(map(_LOOP_SECONDS.__getitem__, settings.loops))
    steps = (settings.steps_per_turn + 1) * len(settings.batches) * _STEP_CONTENDERS[kind]
    return _START_SECONDS + repeats * steps * sum(map(_STEP_SECONDS.__getitem__, settings.models))
