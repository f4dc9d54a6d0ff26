"""Kills a process of many jobs, those of all libraries in turns."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random

from hvdtrain.errors import HvdtrainError
from hvdtrain_bench.analysis.failures import Failure
from hvdtrain_bench.analysis.kills import KILLS, NEW_STEP, NEXT_STEP
from hvdtrain_bench.elastic.contenders import CONTENDERS, Contender
from hvdtrain_bench.elastic.kills import kill_one
from hvdtrain_bench.elastic.sizes import RANKS
from hvdtrain_bench.harness.results import Case, Result
from hvdtrain_bench.harness.settings import Settings

_OWN = "hvdtrain"


def measure_kills(settings: Settings, say: Callable[[str], None]) -> Result:
    """Run a job for each kill, and return what the kills cost with each library."""
    skipped: dict[str, str] = {}
    kills: dict[str, int] = {}
    for contender in CONTENDERS:
        problem = contender.problem()
        if problem:
            skipped[contender.name] = problem
        elif number := settings.kills if contender.name.startswith(_OWN) else settings.peer_kills:
            kills[contender.name] = number
    found: dict[str, list[Failure]] = {name: [] for name in kills}
    failed: dict[str, list[str]] = {name: [] for name in kills}
    chosen = [contender for contender in CONTENDERS if contender.name in kills]
    for seed in range(max(kills.values(), default=0)):
        for contender in Random(seed).sample(chosen, len(chosen)):
            if seed >= kills[contender.name]:
                continue
            title = f"  {KILLS}: {contender.name}, {seed + 1} of {kills[contender.name]}"
            try:
                with tempfile.TemporaryDirectory() as folder:
                    failure = kill_one(contender, Path(folder), seed)
                found[contender.name].append(failure)
                say(f"{title}: {failure.seconds:.2f} s")
            except HvdtrainError as error:
                say(f"{title}: {error}")
                failed[contender.name].append(str(error))
    for name in [name for name, failures in found.items() if not failures]:
        skipped[name] = f"no job of {len(failed[name])} went on: {failed[name][0]}"
    cases = [_case(one, found[one.name], failed[one.name]) for one in chosen if found[one.name]]
    return Result(KILLS, RANKS, 1, [], skipped, cases)


def _case(contender: Contender, failures: list[Failure], failed: list[str]) -> Case:
    values = {
        NEW_STEP: [one.seconds for one in failures],
        NEXT_STEP: [one.next_seconds for one in failures],
        **{stage: [one.stages[stage] for one in failures] for stage in failures[0].stages},
    }
    about = {
        "needs": contender.needs,
        "failures": [asdict(one) for one in failures],
        "failed": failed,
    }
    return Case(contender.name, about, "seconds", values)
