"""The extent of measurements, default and quick, and their results as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from hvdtrain.core.exchanges.catalog import exchange_options
from hvdtrain.train.options import RUNS
from hvdtrain.train.records import new_directory, prepare_directory

SHARDED = "sharded"  # the average, by ranks that share the work of the optimizer

_STEPS = re.compile(r"[:,]\s*steps\s*=\s*(\d+)")


def period_of(exchange: str) -> int:
    """Return the number of steps from one exchange, such as "local:steps=8", to the next.

    It is 1 for exchanges of gradients; blocks of samples count as one step.
    """
    if exchange == SHARDED:
        return 1
    if given := _STEPS.search(exchange):
        return int(given[1])
    option = exchange_options(exchange.partition(":")[0]).get("steps")
    return int(option.default or 1) if option else 1


def turn_steps(exchange: str, least: int) -> int:
    """Return the smallest number of whole periods of an exchange that has enough steps."""
    period = period_of(exchange)
    return -(-least // period) * period


MODELS = ("mlp", "transformer", "resnet50", "vit-s", "mnist-cnn")
OPTIMIZERS = ("sgd", "adam")
# Models that exist for Keras.
FITTED = ("mlp", "mnist-cnn")
TASKS = ("digits", "text", "text-decay", "mnist-cnn")
EXCHANGES = ("half:type=bf16", "nbit:bits=1", "powersgd:rank=4", "topk:ratio=0.01", "local:steps=8")
# How much ranks differ is noisy in turns as short as those of other benchmarks.
PROFILE_STEPS = 3  # for each of steps_per_turn

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class MeasurementSettings:
    # Number of turns of each contender; fewer than 8 tell only large differences from noise.
    repeats: int
    seconds_per_turn: float  # approximate duration of a turn of a collective
    sizes_bytes: tuple[int, ...]
    models: tuple[str, ...]
    steps_per_turn: int  # number of training steps; whole periods of an exchange that has some
    idle_seconds: float  # time for which idle ranks are observed
    optimizers: tuple[str, ...] = OPTIMIZERS[:1]
    only: str = ""  # contender of "steps" to measure, if not all
    # Samples per rank of each case, as a factor of each model's own.
    batches: tuple[int, ...] = (1,)
    loops: tuple[str, ...] = ("digits", "mlp", "resnet")
    # Exchanges to compare, as text; see `hvdtrain exchanges`. For "profile" also SHARDED.
    exchanges: tuple[str, ...] = EXCHANGES
    tasks: tuple[str, ...] = TASKS
    points: int = 10  # number of times that a training is interrupted to test what it has learned
    kills: int = 20  # number of processes that are killed in jobs of hvdtrain, one in each
    peer_kills: int = 5  # the same in jobs of each other library
    job_starts: int = 3  # number of times that jobs which take turns are started

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        found = json.loads(text)
        lists = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
        return cls(**{**found, **lists})


# With 12 repeats or more one outlier does not hide a difference (see judge.py).
DEFAULT = MeasurementSettings(
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
    tasks=("digits",),
    steps_per_turn=1,
    idle_seconds=2.0,
    kills=1,
    peer_kills=1,
    job_starts=1,
)


@dataclass(frozen=True)
class PeerFacts:
    """A contender, as it was in its turn."""

    name: str
    library: str
    torch_threads: int  # of a rank, with which torch computes
    threads: int  # all those of a rank
    cores: str  # of the ranks, and whether they are bound to some of them


@dataclass(frozen=True)
class Case:
    """One measurement of all contenders, in turns."""

    name: str
    about: dict[str, Any]
    unit: str  # "seconds", "percent" of a core, or "loss"
    values: dict[str, list[float]]  # of each contender in each repeat
    base: str = ""  # contender with which the others are compared, if any
    again: str = ""  # same code as the base under another name, if any


@dataclass(frozen=True)
class Result:
    kind: str  # "collectives", "steps", "exchange" or another one of worker.py
    ranks: int
    nodes: int  # groups of ranks that share memory
    peers: list[PeerFacts]
    skipped: dict[str, str]
    cases: list[Case]
    extra: dict[str, Any] = field(default_factory=dict)


def result_of(document: Mapping[str, Any]) -> Result:
    peers = [PeerFacts(**peer) for peer in document["peers"]]
    cases = [Case(**case) for case in document["cases"]]
    return Result(**{**document, "peers": peers, "cases": cases})


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")


def results_folder(out: Path | None, command: str) -> Path:
    """Prepare the directory for results; without one make a new one in runs/."""
    if out is None:
        return new_directory(RUNS, command)
    prepare_directory(out)
    return out
