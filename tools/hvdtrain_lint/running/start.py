"""Start a script on two ranks under hvdtrain_lint.running.rank, and read what they recorded."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from hvdtrain.check.probe import Finished, ProbeError, finish
from hvdtrain.errors import UsageError
from hvdtrain.launch.launchers.request import without_allocation
from hvdtrain_lint.rules.rule import Finding
from hvdtrain_lint.running.compare import compare, read_facts
from hvdtrain_lint.source.script import parse_script

_TIMEOUT_SECONDS = 600.0
_RANK = re.compile(r"^\[rank \d+/\d+\] ")
_ERROR = re.compile(r"^[\w.]*(Error|Exception)\b")
# A rank that waits so long for the other one ends the job: then the facts say why.
_STALLS = {"HVDTRAIN_STALL_SECONDS": "10", "HVDTRAIN_STALL_SHUTDOWN_SECONDS": "30"}


def run_script(path: Path, steps: int) -> list[Finding]:
    """Run a script on two ranks until each has taken so many steps; return what went wrong."""
    script, _ = parse_script(path)
    if not script.uses_hvd or "torch" not in script.frameworks:
        raise UsageError(
            f"{path}: --run is for scripts that use hvdtrain.torch or horovod.torch: leave it out"
        )
    with tempfile.TemporaryDirectory(prefix="hvdtrain-lint-") as folder:
        trouble = _run(str(path), str(steps), folder)
        files = [Path(folder) / f"{rank}.jsonl" for rank in range(2)]
        facts = [read_facts(f.read_text().splitlines() if f.exists() else ()) for f in files]
    findings = compare(str(path), *facts)
    if not findings and not all(any(each.kind == "weights" for each in own) for own in facts):
        raise UsageError(f"{path}: no step was taken on two ranks: {trouble or 'see its options'}")
    if not findings and trouble:
        raise UsageError(f"{path}: it fails on two ranks: {trouble}")
    return findings


def _run(*arguments: str) -> str:
    """Run the job; return what it complained of, "" if it ended well."""
    rank = str(Path(__file__).with_name("rank.py"))
    start = [sys.executable, "-m", "hvdtrain", "run", "-np", "2", "--as-horovod"]
    environ = _STALLS | without_allocation(os.environ)  # other hosts do not have the folder
    try:
        done = finish([*start, "--", rank, *arguments], _TIMEOUT_SECONDS, environ=environ)
    except ProbeError as error:
        return str(error)
    return "" if done.returncode == 0 else _complaint(done)


def _complaint(done: Finished) -> str:
    """Return the error that ends the rank which failed first, or whatever else was said."""
    errors: dict[str, str] = {}  # the last of each rank; others may fail because they are ended
    for line in done.stderr.splitlines():
        rank = _RANK.match(line)
        text = _RANK.sub("", line)
        if _ERROR.match(text):
            errors[rank[0] if rank else ""] = text
    return next(iter(errors.values()), done.complaint)
