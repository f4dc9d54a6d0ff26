"""The names of checkpoint files: the position in the run, and a digest of the file.

checkpoint-EPOCH-DIGEST.safetensors, and checkpoint-EPOCH+SAMPLES-DIGEST.safetensors within an
epoch, where DIGEST is the start of the SHA-256 of the file; best-... for the best one so far.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

CHECKPOINT, BEST = "checkpoint", "best"
DIGEST_LENGTH = 16

# Before that of every checkpoint.
NO_POSITION = (-1, 0)

_PATTERN = re.compile(
    rf"({CHECKPOINT}|{BEST})-(\d+)(?:\+(\d+))?-([0-9a-f]{{{DIGEST_LENGTH}}})\.safetensors"
)


@dataclass(frozen=True)
class CheckpointName:
    """The name of a checkpoint file, parsed."""

    kind: str
    epoch: int
    samples: int
    digest: str

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """Parse the name of a path; return None if it is not that of a checkpoint."""
        found = _PATTERN.fullmatch(path.name)
        if found is None:
            return None
        return cls(found[1], int(found[2]), int(found[3] or 0), found[4])

    @property
    def position(self) -> tuple[int, int]:
        """Epochs and samples done, which order checkpoints."""
        return self.epoch, self.samples

    def __str__(self) -> str:
        position = f"{self.epoch:04d}+{self.samples}" if self.samples else f"{self.epoch:04d}"
        return f"{self.kind}-{position}-{self.digest}.safetensors"


def position_of(path: Path) -> tuple[int, int]:
    """Return the epochs and samples in a checkpoint's name; -1 epochs if it has another name."""
    name = CheckpointName.of(path)
    return NO_POSITION if name is None else name.position
