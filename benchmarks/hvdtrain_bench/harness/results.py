"""The measurements of the ranks, as they are written to JSON and read back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PeerFacts:
    """A contender, as it was in its turn.

    Attributes:
        torch_threads: number of threads with which torch computes, per rank.
        threads: number of all threads of a rank during its turn.
        cores: cores of rank 0, and whether it is bound to some of them.
    """

    name: str
    library: str
    torch_threads: int
    threads: int
    cores: str


@dataclass(frozen=True)
class Case:
    """One measurement of all contenders, in turns.

    Attributes:
        unit: unit of the values: "seconds", or "percent" of a core.
        values: one value per repeat for each contender.
        base: contender with which the others are compared; "" for none.
        again: same code as the base under another name; "" if there is none.
    """

    name: str
    about: dict[str, Any]
    unit: str
    values: dict[str, list[float]]
    base: str = ""
    again: str = ""


@dataclass(frozen=True)
class Result:
    """The measurements of one job.

    Attributes:
        kind: "collectives", "steps", "exchange", "exchange-loss" or another one of worker.py.
        nodes: number of groups of ranks that share memory.
    """

    kind: str
    ranks: int
    nodes: int
    peers: list[PeerFacts]
    skipped: dict[str, str]
    cases: list[Case]
    extra: dict[str, Any] = field(default_factory=dict)


def read_result(path: Path) -> Result:
    """Read a Result that write_json() wrote."""
    return result_of(json.loads(path.read_text(encoding="utf-8")))


def result_of(document: Mapping[str, Any]) -> Result:
    """Return the Result that a JSON value describes."""
    peers = [PeerFacts(**peer) for peer in document["peers"]]
    cases = [Case(**case) for case in document["cases"]]
    return Result(**{**document, "peers": peers, "cases": cases})


def write_json(path: Path, result: Any) -> None:
    """Write a dataclass, or a JSON value."""
    document = asdict(result) if hasattr(result, "__dataclass_fields__") else result
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")
