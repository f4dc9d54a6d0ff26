"""`python -m hvdtrain bench keras` and `bench tensorflow`: what they measure, and that they end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import start
from tensorflow_environment import keras_variables, tensorflow_python

WITHOUT = "no communication"


def bench(kind: str, out: Path, *words: str) -> list[dict[str, Any]]:
    """Run it as quickly as it can be, and return its results."""
    quick = ["-np", 2, "--quick", "--repeats", 1, "--out", out]
    command = [tensorflow_python(), "-m", "hvdtrain", "bench", kind, *words, *quick]
    with start(command, env=keras_variables()) as job:
        done = job.wait(300)
        job.assert_nothing_left()
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads((out / "bench.json").read_text())["results"]
    return results


def contenders(result: dict[str, Any]) -> set[str]:
    """Return the names of what was timed, each once, in the only case of a result."""
    (case,) = result["cases"]
    assert all(len(times) == 1 and times[0] > 0 for times in case["values"].values())
    return set(case["values"])


@pytest.mark.bench
def test_fits_of_keras(tmp_path: Path) -> None:
    (result,) = bench("keras", tmp_path, "--backend", "torch")
    assert result["kind"] == "keras-torch"
    assert contenders(result) == {WITHOUT, f"{WITHOUT} again", "hvdtrain"}


@pytest.mark.bench
def test_steps_of_tensorflow(tmp_path: Path) -> None:
    tensorflow, strategy = bench("tensorflow", tmp_path)
    ours = {WITHOUT, "hvdtrain", "hvdtrain again", "hvdtrain, sharded"}
    assert contenders(tensorflow) - {"Horovod"} == ours
    assert ("Horovod" in tensorflow["skipped"]) == ("Horovod" not in contenders(tensorflow))
    assert contenders(strategy) == ours | {"MultiWorkerMirroredStrategy"}
