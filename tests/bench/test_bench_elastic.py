"""`python -m hvdtrain bench elastic`: what it measures, and that nothing is left of its jobs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import start


def bench(out: Path, *words: object) -> tuple[str, dict[str, Any]]:
    """Run it to its end; return what it has printed, and its only result."""
    command = [sys.executable, "-m", "hvdtrain", "bench", "elastic", *words, "--out", out]
    with start(command) as job:
        done = job.wait(300)
        job.assert_nothing_left()
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((out / "bench.json").read_text())["results"]
    return done.stdout, result


@pytest.mark.bench
def test_kills(tmp_path: Path) -> None:
    words = ["--part", "kills", "--kills", 1, "--peer-kills", 0, "-np", 2]
    output, result = bench(tmp_path, *words)
    stages = ["noticing", "agreeing", "rebuilding", "retaking"]
    names = ["hvdtrain train", "hvdtrain, script with hvd.elastic"]
    assert [case["name"] for case in result["cases"]] == names
    for case in result["cases"]:
        new, following, *parts = case["values"].values()
        assert list(case["values"])[2:] == stages
        assert min(min(part) for part in parts) > 0
        assert sum(part[0] for part in parts) == pytest.approx(new[0])
        assert following == new  # no step is taken again
        (failure,) = case["about"]["failures"]
        assert (failure["again"], failure["twice"], failure["lost"]) == (0, 0, 0)
        assert case["about"]["failed"] == []
    assert "went on" in output


@pytest.mark.bench
def test_steps_of_elastic_jobs(tmp_path: Path) -> None:
    words = ["--part", "steps", "--quick", "--repeats", 1, "-np", 2]
    _, result = bench(tmp_path, *words)
    (case,) = result["cases"]
    assert list(case["values"]) == ["not elastic", "not elastic again", "elastic"]
    assert all(len(times) == 1 and times[0] > 0 for times in case["values"].values())
    label = "MNIST CNN, 1.2 M: elastic / not elastic"
    (figure,) = [each for each in result["figures"] if each["label"] == label]
    ratio = case["values"]["elastic"][0] / case["values"]["not elastic"][0]
    assert figure["number"] == pytest.approx(ratio)
