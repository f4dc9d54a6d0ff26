"""Files in the directory of a run: config.yaml, environment.json and the results (local)."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain import __version__
from hvdtrain.errors import UsageError
from hvdtrain.files import remove_leftovers, replacing, unfinished_file
from hvdtrain.train.config_file import config_text
from hvdtrain.train.metrics import Values
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.tracking.tracker import AppendFile, masked


def prepare_directory(directory: Path) -> None:
    """Create the directory, check that it is writable, and remove leftovers of killed runs."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with unfinished_file(directory) as file:
            file.write(b"\0")
        remove_leftovers(directory)
    except OSError as error:
        raise UsageError(
            f"{directory} cannot be written ({error.strerror}): name another directory with --out"
        ) from error


def new_directory(parent: Path, name: str) -> Path:
    """Create a new directory parent/name-DATE-TIME, with a number if needed."""
    prepare_directory(parent)
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        directory = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            directory.mkdir()
            return directory
        except FileExistsError:
            number += 1


@contextmanager
def usage_errors(directory: Path) -> Iterator[None]:
    """Turn an OSError in the block into a UsageError about the files of a run."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{error.filename or directory} cannot be used ({error.strerror}): name another "
            "directory with --out"
        ) from error


@dataclass(frozen=True)
class RanksLost:
    """Ranks that ended while the others continued."""

    step: int
    epoch: float
    trained_seconds: float
    lost: Sequence[int]
    ranks: int
    seconds: float  # from the notice until the others were ready for the next step
    global_batch_size: int
    scaled_lr: float
    left: bool = False
    again: int = 0


@dataclass(frozen=True)
class RanksJoined:
    """Ranks that joined the others."""

    step: int
    epoch: float
    trained_seconds: float
    joined: Sequence[int]
    ranks: int
    seconds: float  # from the last step of the others until all were ready for the next one
    start_seconds: float
    global_batch_size: int
    scaled_lr: float


METRICS = "metrics.jsonl"
STEPS = "steps.jsonl"
RANKS = "ranks.jsonl"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class MetricsRecord:
    """One line of metrics.jsonl or steps.jsonl."""

    epoch: float
    step: int
    split: str
    values: Values
    lr: float
    samples_per_second: float
    seconds: float

    def line(self) -> dict[str, Any]:
        epoch = int(self.epoch) if self.epoch == int(self.epoch) else round(self.epoch, 6)
        return {
            "epoch": epoch,
            "step": self.step,
            "split": self.split,
            **self.values,
            "lr": self.lr,
            "samples_per_second": self.samples_per_second,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class Seconds:
    """Times on rank 0; `communicate` is how long training waited for communication."""

    total: float
    compute: float
    communicate: float


@dataclass(frozen=True)
class Summary:
    """The content of summary.json."""

    world_size: int
    hosts: int
    host_names: list[str]
    engine: str
    framework: str
    exchange: str
    global_batch_size: int
    base_lr: float
    scaled_lr: float
    epochs: int
    final: Values
    samples: int
    samples_per_second: float  # samples / seconds.total
    seconds: Seconds  # of all epochs, including evaluation and checkpoints
    weights_sha256: list[str]
    steps: int
    best: dict[str, Any] | None
    ended: str
    parameter_server: dict[str, Any] | None = None
    failures: Sequence[RanksLost] = ()
    joins: Sequence[RanksJoined] = ()


def append_lines(
    directory: Path, name: str, lines: Iterable[Mapping[str, Any]], sync: bool = True
) -> None:
    """Append lines to a JSON lines file, all or none."""
    data = "".join(json_text(line) + "\n" for line in lines).encode()
    with closing(AppendFile(directory / name)) as file:
        file.write(data, sync)


def drop_lines_after(directory: Path, step: int) -> None:
    """Remove the lines of steps after `step` from all such files; the run writes them again."""
    for name in (METRICS, STEPS, RANKS):
        path = directory / name
        if not path.exists():
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [line for line in lines if _step_of(line) <= step]
        with replacing(path) as file:
            file.writelines(f"{line}\n".encode() for line in kept)


def _step_of(line: str) -> float:
    """Return the step of a line; infinity for a torn line of a killed run."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def json_text(value: Mapping[str, Any], indent: int | None = None) -> str:
    """Return JSON, with null for numbers that are not finite."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# Left by a run that is to be resumed, after its checkpoint.
MARKER = "requeue"
LOG = "log.txt"
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"

_FRAMEWORKS = ("torch", "tensorflow", "keras", "jax")


def write_environment(directory: Path, options: TrainOptions, hosts: Sequence[str]) -> None:
    """Write all options, without passwords, and the environment of this process (rank 0 only).

    config.yaml is in the format that --config reads. Versions of frameworks and of the MPI library
    are included if they are loaded. It takes at most half a minute.
    """
    recipe = options.recipe_location.path
    facts = {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(map(masked, sys.orig_argv)),
        "hosts": list(hosts),
        "versions": _versions(),
        "git": {
            "recipe": None if recipe is None else git_state(recipe.absolute().parent, recipe),
            "working_directory": git_state(Path.cwd()),
        },
    }
    for name, text in (
        (CONFIG, masked(config_text(options))),
        (ENVIRONMENT, json.dumps(facts, indent=2) + "\n"),
    ):
        with replacing(directory / name) as file:
            file.write(text.encode("utf-8", "surrogateescape"))


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
