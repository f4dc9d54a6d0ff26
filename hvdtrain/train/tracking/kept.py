"""What a tracker keeps in the directory of the run, to go on in the same place after a resume."""

from __future__ import annotations

import json
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.train.tracking.files import replace_file

__all__ = ["keep", "kept"]


def keep(path: Path, content: dict[str, str]) -> None:
    """Write a small JSON file, replacing an older one."""
    replace_file(path, (json.dumps(content, indent=2) + "\n").encode())


def kept(path: Path, key: str) -> dict[str, str] | None:
    """Return what keep() has written, or None where it has not.

    Raises:
        UsageError: the file is damaged, or lacks `key`.
    """
    try:
        content: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        content[key]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is damaged: remove it to begin a new run there") from error
    return content
