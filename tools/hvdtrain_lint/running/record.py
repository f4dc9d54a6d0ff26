"""What one rank did, as hvdtrain_lint.running.rank has written it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Operation:
    """A collective operation that a script called."""

    name: str
    shape: str
    line: int


@dataclass(frozen=True)
class Step:
    """A step of an optimizer."""

    line: int
    weights: str
    rates: tuple[float, ...]
    samples: str | None
    samples_line: int
    operations: tuple[Operation, ...]


@dataclass
class Record:
    """What one rank did."""

    steps: list[Step] = field(default_factory=list)
    rest: list[Operation] = field(default_factory=list)
    has_failed: bool = False


def read_record(lines: Iterable[str]) -> Record:
    """Return what the lines of a record say; the last one may be cut off."""
    record = Record()
    for line in lines:
        try:
            event: dict[str, Any] = json.loads(line)
        except ValueError:
            break
        if event["event"] == "operation":
            record.rest.append(Operation(event["name"], event["shape"], event["line"]))
        elif event["event"] == "step":
            record.steps.append(
                Step(
                    event["line"],
                    event["weights"],
                    tuple(event["rates"]),
                    event["samples"],
                    event["samples_line"],
                    tuple(record.rest),
                )
            )
            record.rest = []
        else:
            record.has_failed = True
    return record
