"""What ranks measured, as it is written to JSON and read back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Case", "PeerFacts", "Result", "read_result", "write_json"]


@dataclass(frozen=True)
class PeerFacts:
    """A contender, as it was when it had its turn.

    Attributes:
        name: of the contender.
        library: name and version of what it measures.
        torch_threads: threads that torch computes with, per rank.
        threads: all threads of a rank's process during its turn.
        cores: the cores that rank 0 may run on, and whether it is bound to less than all.
    """

    name: str
    library: str
    torch_threads: int
    threads: int
    cores: str


@dataclass(frozen=True)
class Case:
    """One thing that all contenders did, in turns.

    Attributes:
        name: for people.
        about: what it was: numbers and names by their names.
        unit: of the values: "seconds", or "percent" of a core.
        values: of each contender, one for each repeat.
        base: the contender that the others are compared with; "" where nothing is compared.
        again: the same code as the base under another name; "" where there is none.
    """

    name: str
    about: dict[str, Any]
    unit: str
    values: dict[str, list[float]]
    base: str = ""
    again: str = ""


@dataclass(frozen=True)
class Result:
    """What one job of ranks measured.

    Attributes:
        kind: "collectives", "steps", "idle", "checkpoint", "loop" or "profile".
        ranks: how many ranks.
        nodes: how many groups of them share memory.
        peers: the contenders.
        skipped: contenders that are not here, and why.
        cases: the measurements.
        extra: what else a kind found out.
    """

    kind: str
    ranks: int
    nodes: int
    peers: list[PeerFacts]
    skipped: dict[str, str]
    cases: list[Case]
    extra: dict[str, Any] = field(default_factory=dict)


def read_result(path: Path) -> Result:
    """Read what write_json() wrote of a Result."""
    found = json.loads(path.read_text(encoding="utf-8"))
    found["peers"] = [PeerFacts(**peer) for peer in found["peers"]]
    found["cases"] = [Case(**case) for case in found["cases"]]
    return Result(**found)


def write_json(path: Path, result: Any) -> None:
    """Write a dataclass, or what JSON can hold."""
    document = asdict(result) if hasattr(result, "__dataclass_fields__") else result
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")
