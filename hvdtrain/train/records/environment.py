"""What a run ran on: config.yaml and environment.json in its directory."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain import __version__
from hvdtrain.train.config.config_text import config_text
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.records.files import publish, unfinished_file
from hvdtrain.train.records.git import git_state
from hvdtrain.train.tracking.masking import masked

__all__ = ["CONFIG", "ENVIRONMENT", "describe_environment", "write_environment"]

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"

_FRAMEWORKS = ("torch", "tensorflow", "keras", "jax")


def describe_environment(options: TrainOptions, hosts: Sequence[str]) -> dict[str, Any]:
    """Return what this process runs on, for JSON (local; takes at most half a minute).

    Frameworks and the MPI library are named where they are loaded.

    Args:
        options: of the run; the repository of its recipe's file is looked at.
        hosts: of all ranks, by rank.
    """
    recipe = options.recipe_place.path
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
    """Write all options, without passwords, and what they run on (rank 0 only).

    config.yaml is in the form that --config reads.

    Args:
        directory: of the run.
        options: of the run.
        hosts: of all ranks, by rank.
    """
    facts = describe_environment(options, hosts)
    _write(directory / CONFIG, masked(config_text(options)))
    _write(directory / ENVIRONMENT, json.dumps(facts, indent=2) + "\n")


def _versions() -> dict[str, str | None]:
    """Return the version of everything that results may depend on; None: it is not loaded."""
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
    with unfinished_file(path.parent) as file:
        file.write(text.encode("utf-8", "surrogateescape"))
        publish(file, path)
