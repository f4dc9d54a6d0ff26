"""The libraries whose jobs lose a process: how each is started, and what it needs."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.launch.launchers.mpi_library import loaded_library
from hvdtrain.launch.launchers.options import require_tolerance
from hvdtrain_bench.elastic.notes import BATCH, RANKS

_HERE = Path(__file__).parent
_MODULE = "hvdtrain_bench.elastic"
# Horovod puts the host of a killed process on a list and starts nothing there: each has its own.
_NAMES = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class ElasticContender:
    name: str
    needs: str  # what it needs beside the script
    # Returns the command line of a job with the folder for its notes.
    command: Callable[[Path], list[str]]
    problem: Callable[[], str]  # returns why it cannot run here; "" if it can
    # Returns the samples that were used before each world, where the notes lack it.
    starts: Callable[[Path], Mapping[int, int]] = lambda folder: {}


def _no_ulfm() -> str:
    try:
        require_tolerance(loaded_library(), "mpirun")
    except UsageError as error:
        return str(error)
    return ""


def _hvdtrain(*words: object) -> list[str]:
    run = [sys.executable, "-m", "hvdtrain", "run", "--elastic", "-np", RANKS, "--", *words]
    return [*map(str, run)]


def _train(folder: Path) -> list[str]:
    options = f"--epochs 1 --batch-size {BATCH} --lr 0.01 --lr-scaling none --device cpu"
    out = ("--checkpoint-every", "2epochs", "--out", folder / "run")
    return _hvdtrain("train", _HERE / "recipe.py", *options.split(), *out)


def _train_starts(folder: Path) -> dict[int, int]:
    file = folder / "run" / "summary.json"
    failures = json.loads(file.read_text(encoding="utf-8"))["failures"] if file.exists() else []
    return {n: one["step"] * BATCH * RANKS for n, one in enumerate(failures, start=1)}


def _script(folder: Path) -> list[str]:
    return _hvdtrain(_HERE / "script.py", "hvdtrain.torch", folder)


def _torchrun(folder: Path) -> list[str]:
    options = ["--nproc-per-node", RANKS, "--max-restarts", 1, "--standalone", "-m"]
    words = [sys.executable, "-m", "torch.distributed.run", *options, f"{_MODULE}.restarted"]
    # Else gloo meets addresses of killed processes in the store of torch 2.13, and fails again.
    return ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", *map(str, words), str(folder)]


def _horovod(folder: Path) -> list[str]:
    script = folder / "hosts.sh"
    lines = "".join(f"echo {name}:1\n" for name in (*_NAMES, socket.gethostname()))
    script.write_text(f"#!/bin/sh\n{lines}", encoding="utf-8")
    script.chmod(0o755)
    options = f"--gloo --network-interface lo -np {RANKS} --min-np {RANKS - 1}".split()
    launcher = [str(Path(sys.executable).with_name("horovodrun")), *options]
    job = [sys.executable, "-m", f"{_MODULE}.script", "horovod.torch", str(folder)]
    return [*launcher, "--host-discovery-script", str(script), *job]


def _no_horovod() -> str:
    if importlib.util.find_spec("horovod") is None:
        return "it is not installed: python -m hvdtrain build-horovod"
    if not os.access(Path(sys.executable).with_name("horovodrun"), os.X_OK):
        return "there is no horovodrun beside this Python"
    from horovod.common.util import gloo_built

    return "" if gloo_built() else "it was built without Gloo, which its elastic mode needs"


CONTENDERS = (
    ElasticContender("hvdtrain train", "mpirun of Open MPI 5", _train, _no_ulfm, _train_starts),
    ElasticContender(
        "hvdtrain, script with hvd.elastic",
        "mpirun of Open MPI 5; state.commit() in the script",
        _script,
        _no_ulfm,
    ),
    ElasticContender(
        "Horovod elastic",
        "horovodrun, which serves a rendezvous; a script that lists hosts; Gloo; ssh between "
        "hosts; state.commit() in the script",
        _horovod,
        _no_horovod,
    ),
    ElasticContender(
        "torchrun --max-restarts",
        "torchrun, which serves a rendezvous; checkpoints on a disk of all hosts, written and "
        "read by the script",
        _torchrun,
        lambda: "",
    ),
)
