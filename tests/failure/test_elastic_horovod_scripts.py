"""Scripts that were written for Horovod's elastic training go on when a rank is killed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from ranks import start
from tensorflow_environment import keras_variables, tensorflow_python

SCRIPTS = ROOT / "tests" / "scripts" / "horovod_scripts"
RANKS, LEFT = 3, 2
QUICK = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_mtl": "^ofi"}


def survive(
    python: Path, script: str, victim: int, env: Mapping[str, object], wanted: int = 0
) -> list[dict[str, Any]]:
    """Run a script, of which a rank is killed, and return what those report that are left.

    At the end there are `wanted` ranks, or those that are left.
    """
    options = ["--min-np", LEFT, *(["--max-np", wanted] if wanted else [])]
    words = ["run", "--elastic", "--as-horovod", "-np", RANKS, *options, "--", SCRIPTS / script]
    more = ["--wanted", wanted] if wanted else []
    command = [python, "-m", "hvdtrain", *words, "--victim", victim, *more]
    with start(command, env=QUICK | dict(env)) as job:
        done = job.ended(600, code=0)
        results: list[dict[str, Any]] = job.results_of_those_left({*range(RANKS)} - {victim})
    assert done.stderr.count(f"rank {victim} of {RANKS} ended; {LEFT} left after ") == 1
    ranks = wanted or LEFT
    assert [(r["ranks"], r["rate"]) for r in results] == [(ranks, pytest.approx(ranks))] * LEFT
    return results


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_with_pytorch(victim: int) -> None:
    first, second = survive(Path(sys.executable), "elastic_torch.py", victim, {})
    assert first["loss"] == second["loss"] < 1


@pytest.mark.soak
@pytest.mark.parametrize(("victim", "wanted"), [(0, 0), (1, 0), (1, 3)])
def test_with_keras(victim: int, wanted: int) -> None:
    """A rank that joins begins with a step that the others take in their reset callback."""
    results = survive(tensorflow_python(), "elastic_keras.py", victim, keras_variables(), wanted)
    assert [result["epoch"] for result in results] == [3, 3]
