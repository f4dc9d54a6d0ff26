"""Start jobs of 2, 8, 32, ... ranks of the core alone, and collect what their ranks have noted."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from hvdtrain.errors import HvdtrainError
from hvdtrain_bench.harness.jobs import RankLauncher, running
from hvdtrain_bench.harness.results import Result
from hvdtrain_bench.harness.text import table_of, time_text
from hvdtrain_bench.many.rank import GOES_ON, KILLED, LATE, REPORTED, STALLS

MANY = "ranks"
ENDS = (STALLS, KILLED, GOES_ON)
_STAGES = ("MPI_Init", "init", "first all-reduce", "all-reduce", "process set")
_CPU = ("ranks", "CPU time: MPI_Init", "rest of init()", *_STAGES[2:], "recovery", "shutdown")
_HELD = ("ranks", "descriptors", "memory", "its share", "node memory", "messages sent", "to peers")
_WAITS = ("ranks", "stall reported after", "job ended after a kill", "recovered after")

_STALL_SECONDS = 5
_LIMIT_SECONDS, _POLL_SECONDS = 900.0, 0.01
_STALLED = f"] stalled: allreduce {LATE!r}".encode()
# What Open MPI writes at its end, for each peer, of messages of programs and of collectives.
_MESSAGES = re.compile(r"^[EI]\t\d+\t\d+\t(\d+) bytes\t(\d+) msgs", re.MULTILINE)


def counts(most: int) -> list[int]:
    return sorted({most, *(n for k in range(8) if (n := 2 * 4**k) <= most)})


def measure_many(
    launcher: RankLauncher, most: int, ends: Sequence[str], say: Callable[[str], None]
) -> list[Result]:
    """Return the figures of one job for each number of ranks and way to end."""
    results = []
    for ranks in counts(most):
        figures: dict[str, Any] = {}
        for end in ends:
            say(f"measuring a job of {ranks} ranks that {end.replace('-', ' ')}")
            figures[end] = _job(launcher, ranks, end)
        results.append(Result(MANY, ranks, figures[ends[0]]["nodes"], [], {}, [], figures))
    return results


def _job(launcher: RankLauncher, ranks: int, end: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as path, open(Path(path, "output"), "w+b") as output:
        folder = Path(path)
        words = ["hvdtrain_bench.many.rank", folder, end]
        command = launcher.command(ranks, *words, elastic=end == GOES_ON)
        more = {
            "HVDTRAIN_STALL_SECONDS": str(_STALL_SECONDS if end == STALLS else 0),
            "OMPI_MCA_pml_monitoring_enable": "1",
            "OMPI_MCA_pml_monitoring_enable_output": "3",
            "OMPI_MCA_pml_monitoring_filename": str(folder / "sent"),
        }
        with running([replace(command, environ={**command.environ, **more})], output) as (job,):
            reported = _wait(job.poll, folder, time.monotonic() + _LIMIT_SECONDS)
            ended = time.time()
        notes = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
        if len(notes) < ranks or (job.returncode != 0) != (end == KILLED):
            told = (folder / "output").read_text(errors="replace").strip()[-2000:]
            raise HvdtrainError(f"{ranks} ranks, {end}: exit code {job.returncode}\n{told}")
        sent = [_MESSAGES.findall(file.read_text()) for file in folder.glob("sent*")]
    return _figures(notes, sent, reported, ended)


def _wait(poll: Callable[[], int | None], folder: Path, deadline: float) -> float:
    """Wait for the end of a job; return when it reported a stall, and let it go on then."""
    reported = 0.0
    while poll() is None and time.monotonic() < deadline:
        if not reported and _STALLED in (folder / "output").read_bytes():
            reported = time.time()
            (folder / REPORTED).touch()
        time.sleep(_POLL_SECONDS)
    return reported


def _figures(
    notes: Sequence[dict[str, Any]],
    sent: Sequence[Sequence[tuple[str, str]]],
    reported: float,
    ended: float,
) -> dict[str, Any]:
    """Return CPU seconds (median) and wall seconds (most) of each stage, and what ranks hold."""
    found: dict[str, Any] = {"nodes": len({one["node"] for one in notes})}
    for name in notes[0]:
        values = [one[name] for one in notes if name in one]
        if isinstance(values[0], list):
            cpu, wall = zip(*values, strict=True)
            found[name] = {"cpu": median(cpu), "most cpu": max(cpu), "wall": max(wall)}
    for name in ("descriptors", "memory", "share"):
        found[name] = max(one[name] for one in notes)
    found["node memory"] = sum(one["node memory"] for one in notes) // found["nodes"]
    if any(sent):
        found["messages"] = max(sum(int(count) for _, count in each) for each in sent)
        found["peers"] = max(map(len, sent))
    if reported:
        # The last rank does not wait for others when it comes; all others are there by then.
        due = sorted(one["waits since"] for one in notes)[-1] + _STALL_SECONDS
        found["reported after"] = reported - due
    if "killed at" in notes[-1]:
        found["ended after"] = ended - notes[-1]["killed at"]
    return found


def tables(results: Sequence[Result]) -> list[Table]:
    """Return the CPU time of the stages, what a rank holds, and waits, by the number of ranks."""
    cpu, held, waits = (table_of("", columns) for columns in (_CPU, _HELD, _WAITS))
    for result in results:
        size = f"{result.ranks}" + (f" on {result.nodes} nodes" if result.nodes > 1 else "")
        first = next(iter(result.extra.values()))
        stalls, killed, goes_on = (result.extra.get(end, {}) for end in ENDS)
        recovery, shutdown = goes_on.get("recovery", {}), first.get("shutdown", {})
        stages = [*(first[name] for name in _STAGES), recovery, shutdown]
        cpu.add_row(size, *(time_text(stage.get("cpu")) for stage in stages))
        sizes = [f"{first[name] / 1e6:.0f} MB" for name in ("memory", "share", "node memory")]
        sent = [str(first.get(name, "-")) for name in ("messages", "peers")]
        held.add_row(size, str(first["descriptors"]), *sizes, *sent)
        lasted = (stalls.get("reported after"), killed.get("ended after"), recovery.get("wall"))
        waits.add_row(size, *map(time_text, lasted))
    return [cpu, held, waits]
