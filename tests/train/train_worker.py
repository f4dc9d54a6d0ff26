"""Trains through the Python API, several times in one world: train_worker.py CASES.

CASES is a JSON list of TrainOptions with more keys: "kind" says what is trained, a function of
train_recipes.py; "apart" lets each rank be on a node of its own; "eager" has the ranks tell each
other after each step; "stop" says after which step of this start the last rank gets SIGUSR1, and
"kill" after which it gets SIGKILL, once the checkpoint "saved" is there; "after" names
the case whose last checkpoint it continues. Each rank reports one result for each case.
"""

import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import train_recipes
from forced_costs import force_choice
from nodes import nodes_of_their_own
from one_bit import OneBit
from ranks import report
from stopping import after_step, stop_in_step

import hvdtrain.torch as hvd
from hvdtrain.core.exchanges.catalog import EXCHANGES
from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.train.checkpoints import checkpoint_files
from hvdtrain.train.loop import heartbeat
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.records import MARKER
from hvdtrain.train.resume import Progress
from hvdtrain.train.run_log import RunLog
from hvdtrain.train.session import train


def note_saves(patches: pytest.MonkeyPatch) -> list[int]:
    steps: list[int] = []
    plain = RunLog.save

    def noting(self: RunLog, progress: Progress, *others: Any) -> None:
        steps.append(progress.step)
        plain(self, progress, *others)

    patches.setattr(RunLog, "save", noting)
    return steps


def kill_once_there_is(directory: Path, name: str, seen: Any) -> None:
    """Write down what each rank has seen, and end the last rank as nobody can refuse to."""
    part = directory / f"seen-{hvd.rank()}.part"
    part.write_text(json.dumps(seen))
    part.rename(part.with_suffix(".json"))  # once it is seen, its writer may be ended
    if hvd.rank() < hvd.size() - 1:
        return
    deadline = time.monotonic() + 240
    wanted = [f"{name}-*", *(f"seen-{rank}.json" for rank in range(hvd.size()))]
    while not all(list(directory.glob(pattern)) for pattern in wanted):
        assert time.monotonic() < deadline, f"never saw {wanted}"
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def run(case: dict[str, Any]) -> dict[str, Any]:
    kind, out = case.pop("kind"), Path(case.pop("out"))
    eager, stop, kill, saved = (case.pop(key, None) for key in ("eager", "stop", "kill", "saved"))
    if "after" in case:
        case["resume"] = str(checkpoint_files(out.parent / case.pop("after"))[0])
    nodes = nodes_of_their_own if case.pop("apart", False) else nullcontext
    made: list[Recipe] = []

    def make() -> Recipe:
        made.append(getattr(train_recipes, kind)())
        return made[-1]

    with pytest.MonkeyPatch.context() as patches:
        patches.setitem(EXCHANGES, "onebit", OneBit)
        force_choice(patches)
        saves = note_saves(patches)
        if eager:
            patches.setattr(heartbeat, "_EVERY_SECONDS", 0.0)
        if stop is not None:
            stop_in_step(patches, stop)
        if kill is not None:
            after_step(
                patches, kill, lambda: kill_once_there_is(out, saved, made[0].model.seen["train"])
            )
        try:
            options = TrainOptions(**{"out": out, "quiet": True, **case})
            with nodes():
                summary = train(options, None if kind == "plain" else make)
        except UsageError as error:
            return {"refused": str(error)}
        except TrainingError as error:
            return {"failed": str(error)}
        finally:
            layers = [layer for recipe in made for layer in recipe.model.modules()]
            assert all(layer.counts for layer in layers if isinstance(layer, hvd.SyncBatchNorm))
    model = made[0].model if made else None
    noted = {"seen": getattr(model, "seen", None), "saves": saves}
    if summary is None:
        files = [path.name for path in checkpoint_files(out)]
        return {"newest": files[0], "marker": (out / MARKER).read_text(), **noted}
    return {**asdict(summary), **noted}


results = [run(case) for case in json.loads(sys.argv[1])]
report(len(results), results)
