"""Training runs whose ranks kill themselves, and what must be true of each of them."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from disturbances import PAUSES
from job import Completed
from ranks import launch, run_ranks
from run_files import metrics_of, summary_of
from segments import no_new_segments

RECIPE = Path(__file__).parents[2] / "failure" / "killed_recipe.py"
SAMPLES, BATCH, EPOCHS = 100, 12, 3
STEPS = 9  # of each epoch
OPTIONS = (
    f"--global-batch-size {BATCH} --epochs {EPOCHS} --lr 0.01 --lr-scaling none "
    "--device cpu --checkpoint-every 1epoch --log-every 4"
)
TOLERATE = ["--with-ft", "ulfm"]


def words(out: Path, *more: object, recipe: object = RECIPE) -> list[str]:
    return [*f"-m hvdtrain train {recipe} --out {out} {OPTIONS}".split(), *map(str, more)]


def train(
    folder: Path,
    ranks: int,
    kills: str,
    *more: object,
    variables: Mapping[str, object] | None = None,
    recipe: object = RECIPE,
    python: Path | None = None,
    tolerate: Sequence[str] = TOLERATE,
) -> tuple[Completed, dict[str, Any]]:
    """Train while ranks kill themselves, check the files, and return the job and the summary."""
    out, ledger = folder / "out", folder / "ledger"
    env = {"KILLS": kills, "HVDTRAIN_LEDGER": ledger, **(variables or {})}
    # Servers take no steps, and some ranks may have no virtual shards.
    if not {"--strategy", "--virtual-shards"} & set(more):
        env["TOGETHER"] = folder
    with (
        no_new_segments(),
        launch(
            words(out, *more, recipe=recipe), ranks, env=env, launcher_args=tolerate, python=python
        ) as job,
    ):
        done = job.ended(600, code=0)
    summary = summary_of(out)
    assert len(set(summary["weights_sha256"])) == 1
    assert len(summary["weights_sha256"]) == summary["world_size"]
    require_each_once(ledger, ranks, [*summary["failures"], *summary["joins"]])
    lines = [(line["split"], line["step"]) for line in metrics_of(out)]
    assert len(set(lines)) == len(lines)
    return done, summary


def survive(folder: Path, ranks: int, kills: str, *more: object, **how: Any) -> dict[str, Any]:
    done, summary = train(folder, ranks, kills, *more, **how)
    lost = [kill for kill in kills.split() if not kill.endswith(PAUSES)]
    assert summary["world_size"] == ranks - len(lost)
    assert (done.stdout.count("disturbed: ") > 0) == (len(lost) < len(kills.split()))
    leaving = sum(kill.endswith(":leave") for kill in lost)
    assert sum(len(each["lost"]) for each in summary["failures"] if each["left"]) == leaving
    assert done.stdout.count(" (SIGUSR2): training continues with ") == (leaving > 0), done.stdout
    assert sum(len(failure["lost"]) for failure in summary["failures"]) == len(lost)
    assert done.stdout.count("training continues with") == len(summary["failures"]), done.stdout
    assert ("memory, taken every 4 steps" in done.stdout) == ("--elastic-snapshot" in more)
    return summary


def of_one_rank(folder: Path, *more: object, recipe: object = RECIPE, **how: Any) -> dict[str, Any]:
    out = folder / "alone"
    run_ranks(words(out, *more, recipe=recipe), 1, cases_expected=False, **how)
    return {**summary_of(out), "losses": losses(out)}


def require_like(summary: Mapping[str, Any], alone: Mapping[str, Any]) -> None:
    assert summary["final"]["loss"] == pytest.approx(alone["final"]["loss"], rel=1e-4)
    for name in ("steps", "samples", "global_batch_size", "scaled_lr"):
        assert summary[name] == alone[name], name


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in metrics_of(out) if line["split"] == "train"]


def ledger_lines(ledger: Path) -> list[dict[str, Any]]:
    paths = ledger.parent.glob(f"{ledger.name}.*")
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def require_each_once(ledger: Path, ranks: int, changes: Sequence[Mapping[str, Any]]) -> None:
    """Check that the steps that count have used each sample once in each epoch."""
    counts = [ranks] * STEPS * EPOCHS  # by step
    for change in sorted(changes, key=lambda change: change["step"]):
        counts[change["step"] :] = [change["ranks"]] * (len(counts) - change["step"])
    used: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(EPOCHS)}
    for line in ledger_lines(ledger):
        if counts[line["epoch"] * STEPS + line["done"] // BATCH] == line["ranks"]:
            used[line["epoch"]].update(line["samples"])
    for epoch, samples in used.items():
        assert samples == Counter(range(SAMPLES)), epoch
