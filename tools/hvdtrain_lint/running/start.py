"""Start a script on two ranks under hvdtrain_lint.running.rank, and read what they recorded."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from hvdtrain.check.probe import Finished, ProbeError, finish
from hvdtrain.errors import UsageError
from hvdtrain.launch.launchers.choice import mpirun_command
from hvdtrain.launch.launchers.mpi_library import find_mpirun, loaded_library
from hvdtrain.launch.launchers.request import without_allocation
from hvdtrain_lint.rules.rule import Finding
from hvdtrain_lint.running.compare import compare, read_record
from hvdtrain_lint.source.script import parse_script

_TIMEOUT_SECONDS = 600.0
_RANK = re.compile(r"^\[rank \d+/\d+\] ")
_ERROR = re.compile(r"^[\w.]*(Error|Exception)\b")
# A rank that waits so long for the other one ends the job: then the records say why.
_STALLS = {"HVDTRAIN_STALL_SECONDS": "10", "HVDTRAIN_STALL_SHUTDOWN_SECONDS": "30"}


def run_script(path: Path, steps: int, horovod_names: str) -> list[Finding]:
    """Run a script on two ranks until each has taken so many steps; return what went wrong."""
    script, _ = parse_script(path)
    if not script.uses_hvd or "torch" not in script.frameworks:
        raise UsageError(
            f"{path}: --run is for scripts that use hvdtrain.torch or horovod.torch: leave it out"
        )
    with tempfile.TemporaryDirectory(prefix="hvdtrain-lint-") as folder:
        trouble = _run(path, steps, horovod_names, folder)
        files = [Path(folder) / f"{rank}.jsonl" for rank in range(2)]
        records = [read_record(f.read_text().splitlines() if f.exists() else ()) for f in files]
    findings = compare(str(path), records[0], records[1])
    if not findings and not all(record.steps for record in records):
        raise UsageError(f"{path}: no step was taken on two ranks: {trouble or 'see its options'}")
    if not findings and trouble:
        raise UsageError(f"{path}: it fails on two ranks: {trouble}")
    return findings


def _run(path: Path, steps: int, horovod_names: str, folder: str) -> str:
    """Run the job; return what it complained of, "" if it ended well."""
    library = loaded_library()
    environ = without_allocation(os.environ)  # other hosts do not have the folder
    program = [sys.executable, "-m", "hvdtrain_lint.running.rank", str(path), str(steps), folder]
    line = mpirun_command(
        str(find_mpirun(library)),
        library.vendor,
        program,
        ranks=2,
        environ=environ,
    )
    inherited = environ.get("PYTHONPATH")
    python_path = os.pathsep.join([horovod_names, *([inherited] if inherited else [])])
    stalls = {name: environ.get(name, seconds) for name, seconds in _STALLS.items()}
    variables = {**stalls, **line.variables, "PYTHONPATH": python_path}
    try:
        done: Finished = finish(line.argv, _TIMEOUT_SECONDS, variables, environ)
    except ProbeError as error:
        return str(error)
    return "" if done.returncode == 0 else _complaint(done)


def _complaint(done: Finished) -> str:
    """Return the error that ends a traceback of a rank, or whatever else was said."""
    lines = [_RANK.sub("", line) for line in done.stderr.splitlines()]
    return next((line for line in reversed(lines) if _ERROR.match(line)), done.complaint)
