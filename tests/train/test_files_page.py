"""docs/files.md lists what is found in the directory of a run, and nothing that is not there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ranks import run_ranks, start

PAGE = Path(__file__).resolve().parents[2] / "docs" / "files.md"
# A run that is not stopped, and that is not sent to these trackers, has none of these.
ABSENT = {"requeue", "mlflow.json", "wandb.json"}
ALL = "--best loss --log-every 1 --checkpoint-every=5steps --keep-checkpoints 9 --track tensorboard"


def listed() -> set[str]:
    """Return the names in the page's first table."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## A training run\n")[2]
    rows = re.findall(r"^\| (`.*?) \|", section.partition("\n## ")[0], re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def pattern(name: str) -> str:
    """Return the name as the page writes it."""
    name = re.sub(r"-[0-9a-f]{16}\b", "-DIGEST", name)
    return re.sub(r"\+\d+", "+SAMPLES", re.sub(r"-\d{4}\b", "-EPOCH", name))


def test_files_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["-m", "hvdtrain", "train", "digits", "--epochs", "1", "--out", str(run)]
    run_ranks([*options, *ALL.split()], 2)
    with start([sys.executable, "-m", "hvdtrain", "report", run]) as job:
        assert job.wait(300).returncode == 0
    found = {pattern(path.name) + "/" * path.is_dir() for path in run.iterdir()}
    assert found == listed() - ABSENT
