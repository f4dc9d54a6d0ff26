"""One checkpoint file: written completely or not at all, and verified before it is used."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hvdtrain.errors import UsageError
from hvdtrain.files import publish, unfinished_file
from hvdtrain.train.checkpoint.tensor_file import TensorLibrary, flatten, read, unflatten, write

CHECKPOINT, BEST = "checkpoint", "best"
DIGEST_LENGTH = 16

# Sorts before the position of every checkpoint.
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


# Metadata of the file: everything that is not a tensor.
_ABOUT, _VERSION = "hvdtrain", 1


def write_checkpoint(
    directory: Path, epoch: int, samples: int, content: Mapping[str, Any], library: TensorLibrary
) -> Path:
    """Write a checkpoint and flush it to the disk; if it fails, no part of it stays."""
    tensors, skeleton = flatten(content)
    about = json.dumps({"version": _VERSION, "content": skeleton}, allow_nan=False)
    with unfinished_file(directory) as file:
        digest = write(file, tensors, {"format": library, _ABOUT: about})
        path = directory / str(CheckpointName(CHECKPOINT, epoch, samples, digest[:DIGEST_LENGTH]))
        publish(file, path)
    return path


def load_checkpoint(path: Path, library: TensorLibrary) -> dict[str, Any]:
    """Read a checkpoint into CPU memory; no code in it is run (rank 0 only)."""
    try:
        if path.is_dir():
            raise UsageError(
                f"--resume {path} is a directory: resume it with --resume auto --out {path}, or "
                "name a checkpoint in it"
            )
        if not path.is_file():
            raise UsageError(f"there is no checkpoint {path}: name an existing file")
        name = CheckpointName.of(path)
        if name is not None and _digest(path) != name.digest:
            raise ValueError("its content is not what was written")
        content = _content(path, library)
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        raise UsageError(f"checkpoint {path} needs {error.name}, which is not installed") from error
    except OSError as error:
        raise UsageError(
            f"checkpoint {path} cannot be read ({error.strerror or error}): name another with "
            "--resume"
        ) from error
    except Exception as error:  # damaged files raise a dozen types of errors
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UsageError(f"checkpoint {path} is damaged: {reason}") from error
    if isinstance(content, dict) and "epoch" in content and isinstance(content.get("model"), dict):
        return content
    raise UsageError(f"{path} is not a checkpoint of hvdtrain")


def _content(path: Path, library: TensorLibrary) -> Any:
    tensors, metadata = read(path, library)
    if _ABOUT not in metadata:
        return None
    about = json.loads(metadata[_ABOUT])
    if about["version"] != _VERSION:
        raise UsageError(
            f"checkpoint {path} has format version {about['version']}, but this hvdtrain knows "
            f"version {_VERSION}: use the hvdtrain that wrote it"
        )
    return unflatten(about["content"], tensors)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:DIGEST_LENGTH]
