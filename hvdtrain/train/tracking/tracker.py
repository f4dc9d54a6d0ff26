"""The interface of trackers, and files that stay complete but for their last record."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from hvdtrain.errors import UsageError
from hvdtrain.files import replacing


class AppendFile:
    """A file that records are appended to, each in one write: a kill tears at most the last one.

    A record that does not fit on the disk leaves nothing behind: others may follow.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._bytes = os.fstat(self._file.fileno()).st_size

    def write(self, record: bytes, sync: bool = False) -> None:
        try:
            written = self._file.write(record)
            while written < len(record):  # a partial write
                written += self._file.write(record[written:])
            if sync:
                os.fsync(self._file.fileno())
        except OSError:
            os.ftruncate(self._file.fileno(), self._bytes)
            raise
        self._bytes += len(record)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def save_json(path: Path, content: dict[str, str]) -> None:
    with replacing(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def load_json(path: Path, key: str) -> dict[str, str] | None:
    """Return what save_json() has written, or None if there is no file."""
    try:
        content: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        content[key]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is damaged: remove it to begin a new run there") from error
    return content


_NOT_METRICS = {"epoch", "step", "split", "seconds"}
_NOT_OF_RANKS = {"step", "seconds", "span"}
# With more ranks, a tracker would have thousands of curves.
_MOST_RANKS = 16


def metric_values(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a line of metrics.jsonl: "epoch", and SPLIT/NAME for each number.

    A null, which stands for a value that was not finite, becomes NaN; lists are omitted.
    """
    values = {"epoch": float(line["epoch"])}
    for name, value in line.items():
        if name not in _NOT_METRICS and (value is None or isinstance(value, int | float)):
            values[f"{line['split']}/{name}"] = math.nan if value is None else float(value)
    return values


def rank_values(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a line of ranks.jsonl: system/NAME/rank_R for each rank.

    With more than 16 ranks: system/NAME/mean, /min and /max. Values that no rank knows are omitted.
    """
    values: dict[str, float] = {}
    for name, figures in line.items():
        if name in _NOT_OF_RANKS or not isinstance(figures, list):
            continue
        known = {rank: float(value) for rank, value in enumerate(figures) if value is not None}
        if len(figures) <= _MOST_RANKS:
            values |= {f"system/{name}/rank_{rank}": value for rank, value in known.items()}
        elif known:
            values[f"system/{name}/mean"] = sum(known.values()) / len(known)
            values[f"system/{name}/min"] = min(known.values())
            values[f"system/{name}/max"] = max(known.values())
    return values


# Greedy, because a password may hold a slash or an @ itself.
_USER = re.compile(r"(?<=://)\S*@")
_QUERY = re.compile(r"([?&][^=&\s]*(?:key|passw|pwd|secret|token)[^=&\s]*=)[^&\s]+", re.IGNORECASE)


def masked(text: str) -> str:
    """Replace user and password of each address, and passwords in its query, by stars.

    scheme://user:password@host?token=x becomes scheme://***@host?token=***
    """
    return _QUERY.sub(r"\1***", _USER.sub("***@", text))


def one_line(error: Exception) -> str:
    """Return the first line of an exception's message, masked."""
    return masked(str(error).strip().partition("\n")[0] or type(error).__name__)


Status = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class RunInfo:
    """Information about a run for trackers."""

    name: str
    directory: Path
    parameters: Mapping[str, Any]
    resumed_step: int | None = None
    tags: Mapping[str, str] = field(default_factory=dict)


class Tracker(Protocol):
    """Records the values of one run; used on rank 0 only.

    Methods do not wait for a network. They raise if something is wrong with the values of this or
    an earlier call, and can be called again all the same.
    """

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        """Record values."""

    def artifact(self, path: Path) -> None:
        """Record a file, which must not change until end() has returned."""

    def end(self, status: Status) -> None:
        """End the run; call nothing afterwards. "stopped" means that it will be resumed."""
