"""docs/tutorials: each page is worked through, and prints what it says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hosts import AGENT, require_hosts
from pages import steps_of, work_through
from paths import ROOT
from slurm import Slurm, require_slurm
from tensorflow_environment import keras_variables, tensorflow_python

TUTORIALS = ROOT / "docs" / "tutorials"
CLUSTER = TUTORIALS / "laptop-to-cluster.md"
HERE = Path(sys.executable)


@pytest.mark.parametrize(
    "name",
    [
        "first-run",
        *(pytest.param(n, marks=pytest.mark.soak) for n in ("horovod-script", "own-recipe")),
    ],
)
def test_pages_for_pytorch(name: str, tmp_path: Path) -> None:
    work_through(steps_of(TUTORIALS / f"{name}.md"), tmp_path, HERE)


@pytest.mark.soak
def test_keras(tmp_path: Path) -> None:
    env = keras_variables()
    work_through(steps_of(TUTORIALS / "keras.md"), tmp_path, tensorflow_python(), env)


@pytest.mark.soak
def test_a_killed_rank(tmp_path: Path) -> None:
    work_through(steps_of(TUTORIALS / "survive.md"), tmp_path, HERE)


@pytest.mark.soak
def test_two_hosts(tmp_path: Path) -> None:
    """All but the job: what the page calls ssh leads to hosts that stand in for others."""
    require_hosts()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").symlink_to(AGENT)
    steps = [step for step in steps_of(CLUSTER) if "sbatch" not in step.code]
    work_through(steps, tmp_path, HERE, {"PATH": tmp_path / "bin"})


@pytest.mark.slurm
def test_the_job(tmp_path: Path) -> None:
    """The script of the page, and its last part."""
    require_slurm()
    (tmp_path / "slurm").mkdir()
    (tmp_path / "work").mkdir()
    steps = [step for step in steps_of(CLUSTER) if step.file or "job.sh" in step.code]
    with Slurm(tmp_path / "slurm"):
        env = {"SLURM_CONF": tmp_path / "slurm" / "slurm.conf"}
        work_through(steps, tmp_path / "work", HERE, env)
