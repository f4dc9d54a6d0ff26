"""Horovod itself, if it is installed on all ranks."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from hvdtrain_bench.harness.ranks import Ranks

_BUILD = "python -m hvdtrain build-horovod"


@dataclass(frozen=True)
class Library:
    """A library with Horovod's interface, through one of its modules."""

    hvd: Any
    library: str  # its name and version
    # Starts and stops what must not run while others have their turn.
    turn: Callable[[], AbstractContextManager[None]] = nullcontext


@contextmanager
def _turn(module: Any) -> Iterator[None]:
    """Initialize Horovod, and shut it down again (collective); an error ends the job anyway.

    Its thread polls as long as it is initialized, so it is initialized for its turns only.
    """
    module.init()
    yield
    module.shutdown()


def find_horovod(
    ranks: Ranks, framework: str, ours: Any, skipped: dict[str, str]
) -> Library | None:
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
        return None
    cycle = os.environ.get("HOROVOD_CYCLE_TIME", "1")
    version = importlib.import_module("horovod").__version__
    return Library(module, f"Horovod {version} on MPI, cycle {cycle} ms", partial(_turn, module))
