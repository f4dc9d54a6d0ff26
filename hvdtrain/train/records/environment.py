"""The environment of a run: config.yaml and environment.json in its directory."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain import __version__
from hvdtrain.files import replacing
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.options.config_file import config_text
from hvdtrain.train.tracking.tracker import masked

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"

_FRAMEWORKS = ("torch", "tensorflow", "keras", "jax")


def describe_environment(options: TrainOptions, hosts: Sequence[str]) -> dict[str, Any]:
    """Return the environment of this process, for JSON (local; takes at most half a minute).

    Versions of frameworks and of the MPI library are included if they are loaded.
    """
    recipe = options.recipe_location.path
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(map(masked, sys.orig_argv)),
        "hosts": list(hosts),
        "versions": _versions(),
        "git": {
            "recipe": None if recipe is None else git_state(recipe.absolute().parent, recipe),
            "working_directory": git_state(Path.cwd()),
        },
    }


def write_environment(directory: Path, options: TrainOptions, hosts: Sequence[str]) -> None:
    """Write all options, without passwords, and the environment (rank 0 only).

    config.yaml is in the format that --config reads.
    """
    facts = describe_environment(options, hosts)
    _write(directory / CONFIG, masked(config_text(options)))
    _write(directory / ENVIRONMENT, json.dumps(facts, indent=2) + "\n")


def _versions() -> dict[str, str | None]:
    """Return the versions of everything that results may depend on; None if it is not loaded."""
    mpi = sys.modules.get("mpi4py.MPI")
    library = None if mpi is None else mpi.Get_library_version().splitlines()[0].strip("\0 ")
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in _FRAMEWORKS}
    return {
        "python": platform.python_version(),
        "hvdtrain": __version__,
        "numpy": np.__version__,
        **loaded,
        "mpi": library,
    }


def _write(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode("utf-8", "surrogateescape"))


_TIMEOUT_SECONDS = 5.0
# Variables that git's hooks set; they would name another repository than the folder's.
_HOOK_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
_QUIET = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


def git_state(folder: Path, file: Path | None = None) -> dict[str, Any] | None:
    """Return the commit of the repository that a folder is in, and whether files differ from it."""
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    dirty = None if changes is None else bool(changes)
    if file is not None and dirty is False:
        dirty = _git(folder, "ls-files", "--error-unmatch", "--", str(file.absolute())) is None
    return {"commit": commit, "dirty": dirty}


def _git(folder: Path, *words: str) -> str | None:
    """Return the output of git; None if it fails or takes too long."""
    environ = {name: value for name, value in os.environ.items() if name not in _HOOK_VARIABLES}
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
