"""Comparisons as they are run: contenders that train, and some that do not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from job import Completed
from ranks import start

FAULTY = Path(__file__).parent / "faulty_recipe.py"
LIMIT_SECONDS = 300


def compare(folder: Path, *words: object) -> tuple[Completed, dict[str, dict[str, Any]]]:
    """Run a comparison, and return what it printed and its contenders by label."""
    command = [sys.executable, "-m", "hvdtrain", "compare", *words]
    with start([*command, "--repeats", 1, "--out", folder], cwd=folder) as job:
        done = job.wait(LIMIT_SECONDS)
        job.assert_nothing_left()
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    found = json.loads((folder / "compare.json").read_text())["contenders"]
    return done, {one["label"]: one for one in found}


def test_digits(tmp_path: Path) -> None:
    done, rows = compare(tmp_path, "digits", "--with", "hvdtrain,ddp")
    assert (done.returncode, list(rows)) == (0, ["hvdtrain", "ddp", "one process"]), done.stderr
    assert [row["failure"] for row in rows.values()] == [""] * 3
    ours, ddp, alone = rows.values()
    assert ours["trained"] == {"samples": 1437, "seen": 1437, "duplicates": 0, "lost": 0}
    assert ddp["trained"] == {"samples": 1437, "seen": 1438, "duplicates": 1, "lost": 0}
    assert {row["evaluated"]["seen"] for row in rows.values()} == {360}
    # Sums in another order: no more than some units in the last place.
    assert ours["difference"]["final"] < 1e-5
    assert 0 < ours["difference"]["checked"] < 1e-6
    assert 0 < ddp["difference"]["checked"] < 1e-6
    # DDP counts a sample twice in its last step.
    assert ddp["difference"]["final"] > 10 * ours["difference"]["final"]
    assert alone["difference"] == {"checked": 0, "steps": 20, "final": 0}
    assert (alone["processes"], ddp["processes"]) == (1, 2)
    assert ddp["socket_bytes"] > 1e5
    assert all(row["step"]["low"] <= row["step"]["seconds"] for row in rows.values())
    assert "1438, 1 twice" in done.stdout
    assert (tmp_path / "compare.html").read_text().count("<svg") == 5
    assert not (tmp_path / "turns").exists()


def test_a_contender_that_fails(tmp_path: Path) -> None:
    done, rows = compare(tmp_path, FAULTY, "--with", "ddp")
    assert done.returncode == 1
    assert rows["ddp"]["failure"] == "ArithmeticError: nothing adds up (rank 1 of 2)"
    assert rows["one process"]["failure"] == ""
    assert "ddp: ArithmeticError: nothing adds up (rank 1 of 2)\n" in done.stdout


def test_a_contender_that_hangs(tmp_path: Path) -> None:
    done, rows = compare(tmp_path, FAULTY, "--with", "hvdtrain", "--time-limit", 5)
    assert done.returncode == 1
    assert rows["hvdtrain"]["failure"].startswith("it did not end within 5 s, and was ended")
