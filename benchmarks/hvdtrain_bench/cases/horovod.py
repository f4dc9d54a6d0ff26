"""Horovod itself, if it is installed on all ranks."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hvdtrain_bench.harness.ranks import Ranks

_BUILD = "python -m hvdtrain build-horovod"


class Horovod:
    """Horovod through one of its modules.

    Its thread polls as long as it is initialized, so it is initialized for its turns only.
    """

    def __init__(self, module: Any) -> None:
        self.hvd = module
        cycle = os.environ.get("HOROVOD_CYCLE_TIME", "1")
        version = importlib.import_module("horovod").__version__
        self.library = f"Horovod {version} on MPI, cycle {cycle} ms"

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Initialize Horovod, and shut it down again (collective); an error ends the job anyway."""
        self.hvd.init()
        yield
        self.hvd.shutdown()


def find_horovod(
    ranks: Ranks, framework: str, ours: Any, skipped: dict[str, str]
) -> Horovod | None:
    """Return Horovod for a framework, or None and why it is skipped (collective)."""
    problem, module = "", None
    try:
        module = importlib.import_module(f"horovod.{framework}")
        if module is ours:
            problem = "hvdtrain itself answers its name here: take it from PYTHONPATH"
        elif not module.mpi_built():
            problem = f"Horovod was built without MPI: {_BUILD} --force"
    except (ImportError, OSError) as error:
        problem = f"{error}: {_BUILD}"
    problem = ranks.reason(problem)
    if problem:
        skipped["Horovod"] = problem
    return None if problem else Horovod(module)
