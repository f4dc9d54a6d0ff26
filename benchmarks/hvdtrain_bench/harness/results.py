"""The measurements of the ranks, as they are written to JSON and read back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.train.options import RUNS
from hvdtrain.train.records import new_directory, prepare_directory


@dataclass(frozen=True)
class PeerFacts:
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


def read_result(path: Path) -> Result:
    return result_of(json.loads(path.read_text(encoding="utf-8")))


def result_of(document: Mapping[str, Any]) -> Result:
    peers = [PeerFacts(**peer) for peer in document["peers"]]
    cases = [Case(**case) for case in document["cases"]]
    return Result(**{**document, "peers": peers, "cases": cases})


def write_json(path: Path, result: Any) -> None:
    document = asdict(result) if hasattr(result, "__dataclass_fields__") else result
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")


def results_folder(out: Path | None, command: str) -> Path:
    """Prepare the directory for results; without one make a new one in runs/."""
    if out is None:
        return new_directory(RUNS, command)
    prepare_directory(out)
    return out
