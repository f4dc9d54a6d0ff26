"""Training runs whose ranks kill themselves, and what must be true of each of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disturbances import PAUSES
from ranks import launch
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
    """Return the arguments of Python that train a recipe."""
    asked = f"-m hvdtrain train {recipe} --out {out} {OPTIONS}".split()
    return [*asked, *map(str, more)]


def survive(
    folder: Path,
    ranks: int,
    kills: str,
    *more: object,
    variables: Mapping[str, object] | None = None,
    recipe: object = RECIPE,
    python: Path | None = None,
) -> dict[str, Any]:
    """Train while ranks kill themselves, check the files, and return the summary."""
    out, ledger = folder / "out", folder / "ledger"
    env = {"KILLS": kills, "HVDTRAIN_LEDGER": ledger, **(variables or {})}
    # Servers take no steps, and some ranks may have no virtual shards.
    if not {"--strategy", "--virtual-shards"} & set(more):
        env["TOGETHER"] = folder
    with (
        no_new_segments(),
        launch(
            words(out, *more, recipe=recipe), ranks, env=env, launcher_args=TOLERATE, python=python
        ) as job,
    ):
        done = job.wait(300)
        if done.returncode != 0:
            job.fail(f"exit code {done.returncode}")
        job.assert_nothing_left()
    summary = summary_of(out)
    lost = [kill for kill in kills.split() if not kill.endswith(PAUSES)]
    assert summary["world_size"] == ranks - len(lost)
    assert (done.stdout.count("disturbed: ") > 0) == (len(lost) < len(kills.split()))
    leaving = sum(kill.endswith(":leave") for kill in lost)
    assert sum(len(each["lost"]) for each in summary["failures"] if each["left"]) == leaving
    assert done.stdout.count(" (SIGUSR2): training continues with ") == (leaving > 0), done.stdout
    assert len(set(summary["weights_sha256"])) == 1
    assert sum(len(failure["lost"]) for failure in summary["failures"]) == len(lost)
    assert done.stdout.count("training continues with") == len(summary["failures"]), done.stdout
    assert ("memory, taken every 4 steps" in done.stdout) == ("--elastic-snapshot" in more)
    require_each_once(ledger, ranks, summary["failures"])
    lines = [(line["split"], line["step"]) for line in metrics_of(out)]
    assert len(set(lines)) == len(lines)
    return summary


def losses(out: Path) -> list[float]:
    """Return the training loss of each epoch."""
    return [line["loss"] for line in metrics_of(out) if line["split"] == "train"]


def ledger_lines(ledger: Path) -> list[dict[str, Any]]:
    """Return what all ranks have noted of the samples of their steps."""
    paths = ledger.parent.glob(f"{ledger.name}.*")
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def require_each_once(ledger: Path, ranks: int, failures: list[Mapping[str, Any]]) -> None:
    """Check that the steps that count have used each sample once in each epoch."""
    last = {ranks: float("inf")}
    for failure in failures:
        last[ranks], ranks = failure["step"], failure["ranks"]
        last[ranks] = float("inf")
    used: dict[int, Counter[int]] = {}
    for line in ledger_lines(ledger):
        if line["epoch"] * STEPS + line["done"] // BATCH < last[line["ranks"]]:
            used.setdefault(line["epoch"], Counter()).update(line["samples"])
    assert sorted(used) == list(range(EPOCHS))
    for epoch, samples in used.items():
        assert samples == Counter(range(SAMPLES)), epoch
