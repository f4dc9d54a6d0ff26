"""Which commit of a repository a folder is at."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["git_state"]

_TIMEOUT_SECONDS = 5.0
# Set in git's own hooks, they would name another repository than the folder's.
_OF_HOOKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
_QUIET = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


def git_state(folder: Path, file: Path | None = None) -> dict[str, Any] | None:
    """Return the commit of the repository that a folder is in, and whether it says all.

    Args:
        folder: in the repository.
        file: of it, which git must know; others that it does not know make no difference.

    Returns:
        commit, and dirty: files differ from it (None: git did not say in time). None where there
        is no git, no repository, or no commit.
    """
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    dirty = None if changes is None else bool(changes)
    if file is not None and dirty is False:
        dirty = _git(folder, "ls-files", "--error-unmatch", "--", str(file.absolute())) is None
    return {"commit": commit, "dirty": dirty}


def _git(folder: Path, *words: str) -> str | None:
    """Return what git prints; None where it fails or takes too long."""
    environ = {name: value for name, value in os.environ.items() if name not in _OF_HOOKS}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder.absolute()), "-c", "core.fsmonitor=false", *words],
            env={**environ, **_QUIET},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()
