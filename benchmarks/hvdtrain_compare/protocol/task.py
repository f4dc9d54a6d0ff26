"""What the ranks of a contender are asked to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain.train.options import TrainOptions


@dataclass(frozen=True)
class Place:
    """The place of a process among those of its contender."""

    rank: int
    size: int


@dataclass(frozen=True)
class Task:
    """What the processes of a contender do; a file of JSON."""

    strategy: str
    variant: str
    options: Mapping[str, Any]
    ranks: int
    check_steps: int
    keeps_weights: bool
    folder: str
    shared: str

    @property
    def train_options(self) -> TrainOptions:
        """The options of the training."""
        folder = self.options.get("data_dir")
        return TrainOptions(**{**self.options, "data_dir": folder and Path(folder)})

    def write(self, path: Path) -> None:
        """Write the file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Task:
        """Read the file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))
