"""The description of a job that a user asks a scheduler for, independent of the scheduler."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TIME = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_ARRAY = re.compile(r"(\d+)-(\d+)")
_UNITS = (86400, 3600, 60, 1)


@dataclass(frozen=True)
class JobRequest:
    """A job to be submitted.

    Attributes:
        seconds: time limit.
    """

    name: str
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    cpus_per_rank: int
    seconds: int
    notice_seconds: int
    launcher: str
    mpi: str
    account: str
    queue: str
    array: str
    modules: Sequence[str]
    python: str
    script: str
    image: str
    out: str
    arguments: Sequence[str]
    trains: bool

    def __post_init__(self) -> None:
        words = {"--name": self.name, "--script": self.script}
        words |= {"--account": self.account, "--queue": self.queue, "--mpi": self.mpi}
        for option, word in words.items():
            optional = option not in ("--name", "--script")
            if (word or not optional) and not _NAME.fullmatch(word):
                raise UsageError(f"{option} {word!r}: write letters, digits, '.', '_' and '-'")
        counts = {"--nodes": self.nodes, "--cpus-per-rank": self.cpus_per_rank}
        for option, count in counts.items():
            if count < 1:
                raise UsageError(f"{option} must be at least 1, got {count}")
        if self.ranks_per_node < 1:
            raise UsageError(
                "how many ranks on each node? Pass --gpus-per-node or --ranks-per-node"
            )
        if self.gpus_per_node % self.ranks_per_node:
            raise UsageError(
                f"{self.gpus_per_node} GPUs cannot be divided among {self.ranks_per_node} ranks: "
                "give a rank one GPU, or the same number to each"
            )
        if self.seconds < 1:
            raise UsageError("--time must be positive")
        if not 0 < self.notice_seconds < self.seconds:
            raise UsageError("--notice must be positive and shorter than --time")
        if self.mpi and self.launcher != "srun":
            raise UsageError(f"--mpi {self.mpi} goes with --launcher srun only")
        if self.array and not _counts_up(self.array):
            raise UsageError(f"--array {self.array!r}: write it as 1-4")

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def cpus_per_node(self) -> int:
        """Number of cores for all ranks of a node."""
        return self.ranks_per_node * self.cpus_per_rank


def _counts_up(array: str) -> bool:
    match = _ARRAY.fullmatch(array)
    return match is not None and int(match[1]) <= int(match[2])


def parse_seconds(text: str, option: str) -> int:
    """Return the seconds of "4h", "1h30m", "90m" or "1d"."""
    match = _TIME.fullmatch(text)
    if not text or match is None:
        raise UsageError(f"{option} {text!r}: write it as 4h, 90m, 1h30m or 1d")
    return sum(int(count or 0) * unit for count, unit in zip(match.groups(), _UNITS, strict=True))


def clock_text(seconds: int) -> str:
    """Return HH:MM:SS, with more than 24 hours if need be."""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
