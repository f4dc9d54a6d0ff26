"""Comparisons as they are run: contenders that train, and some that do not."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from horovod_environment import horovod_python
from job import Completed
from paths import TRAINING
from ranks import start
from tensorflow_environment import tensorflow_python

# Raises under DDP, and never ends under hvdtrain, on rank 1.
FAULTY = """
import time
import numpy as np
import torch
from hvdtrain.core import context
from hvdtrain.data.dataset import Samples
from hvdtrain.train import Recipe

class Faulty(torch.nn.Linear):
    def forward(self, inputs):
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            raise ArithmeticError("nothing\\n<adds> up")
        if context.is_initialized() and context.current().topology.rank == 1:
            time.sleep(3600)
        return super().forward(inputs)

def recipe():
    points = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
    samples = Samples(points, (points.sum(axis=1) > 0).astype(np.int64))
    return Recipe(Faulty(4, 2), samples, torch.nn.functional.cross_entropy)
"""


def compare(
    folder: Path,
    *words: object,
    python: Path = Path(sys.executable),
    env: Mapping[str, object] | None = None,
) -> tuple[Completed, dict[str, dict[str, Any]]]:
    command = [python, "-m", "hvdtrain", "compare", *words]
    done = start([*command, "--repeats", 1, "--out", folder], env=env, cwd=folder).end()
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
    assert ours["difference"]["checked"] < 1e-6
    assert ddp["difference"]["checked"] < 1e-6
    # DDP counts a sample twice in its last step.
    assert ddp["difference"]["final"] > 10 * ours["difference"]["final"]
    assert alone["difference"] == {"checked": 0, "steps": 20, "final": 0}
    assert (alone["processes"], ddp["processes"]) == (1, 2)
    assert ddp["socket_bytes"] > 1e5
    assert all(row["step"]["low"] <= row["step"]["seconds"] for row in rows.values())
    assert "1438, 1 twice" in done.stdout
    assert (tmp_path / "compare.html").read_text().count("<svg") == 5
    assert not (tmp_path / "turns").exists()


@pytest.mark.soak
def test_other_strategies_of_torch(tmp_path: Path) -> None:
    names = "hvdtrain:sharded,hvdtrain:local:steps=4,fsdp2,dp,accelerate,torch-postlocal"
    done, rows = compare(tmp_path, "digits", "--with", names, "--batch-size", 16)
    assert (done.returncode, len(rows)) == (0, 7)
    assert {name: row["failure"] for name, row in rows.items() if row["failure"]} == {}
    for name, row in rows.items():
        averages = "local" not in name
        assert (row["difference"]["checked"] < 1e-6) == averages, name
        assert row["trained"]["lost"] == 0
        assert (row["trained"]["duplicates"] == 0) == (row["processes"] == 1 or "hvd" in name)
        assert row["evaluated"]["seen"] == 360
        assert row["memory_bytes"] > 1e8
        assert row["scores"]["accuracy"] > 0.3
    assert rows["dp"]["difference"] == rows["one process"]["difference"]
    assert "without GPUs" in rows["dp"]["notes"][0]
    # Shards are gathered: more than DDP sends.
    assert rows["fsdp2"]["socket_bytes"] > rows["accelerate"]["socket_bytes"]


@pytest.mark.soak
def test_strategies_of_keras(tmp_path: Path) -> None:
    """In float64: in float32 rounding grows to 4e-3 within an epoch."""
    names = "hvdtrain,horovod,mirrored,jax-distribution"
    words = ("digits", "--framework", "keras", "--dtype", "float64", "--with", names)
    done, rows = compare(tmp_path, *words, python=tensorflow_python())
    assert (done.returncode, len(rows)) == (0, 5)
    for name, most in (("hvdtrain", 1e-12), ("mirrored", 1e-12), ("jax-distribution", 1e-6)):
        assert rows[name]["failure"] == ""
        assert rows[name]["difference"]["final"] < most
        assert rows[name]["trained"] == rows["one process"]["trained"]
        assert rows[name]["evaluated"]["seen"] == 360
    assert "devices of the CPU" in rows["mirrored"]["notes"][0]


@pytest.mark.horovod
def test_horovod(tmp_path: Path) -> None:
    named = f"horovod={horovod_python()}"
    done, rows = compare(tmp_path, "digits", "--with", "horovod", "--python", named)
    assert (done.returncode, rows["horovod"]["failure"]) == (0, "")
    assert rows["horovod"]["difference"]["checked"] < 1e-6
    assert rows["horovod"]["trained"]["duplicates"] == 1
    assert rows["horovod"]["library"].startswith("Horovod 0.")


def test_under_torchrun_with_one_process(tmp_path: Path) -> None:
    """Its variables say rank 0 of 1, which ranks that mpirun starts must not believe."""
    env = {"TORCHELASTIC_RUN_ID": "none", "RANK": 0, "WORLD_SIZE": 1}
    words = (TRAINING / "point_recipes.py", "--with", "hvdtrain", "--batch-size", 2)
    done, rows = compare(tmp_path, *words, env=env)
    assert (done.returncode, rows["hvdtrain"]["failure"]) == (0, "")


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    path = tmp_path / "faulty.py"
    path.write_text(FAULTY)
    return path


def test_a_contender_that_fails(faulty: Path, tmp_path: Path) -> None:
    done, rows = compare(tmp_path, faulty, "--with", "ddp")
    assert done.returncode == 1
    assert rows["ddp"]["failure"] == "ArithmeticError: nothing <adds> up (rank 1 of 2)"
    assert rows["one process"]["failure"] == ""
    assert "ddp: ArithmeticError: nothing <adds> up (rank 1 of 2)\n" in done.stdout
    page = (tmp_path / "compare.html").read_text()
    assert "ArithmeticError: nothing &lt;adds&gt; up" in page
    assert "<adds>" not in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert " style=" not in page  # the policy forbids them


def test_a_contender_that_hangs(faulty: Path, tmp_path: Path) -> None:
    done, rows = compare(tmp_path, faulty, "--with", "hvdtrain", "--time-limit", 5)
    assert done.returncode == 1
    assert rows["hvdtrain"]["failure"].startswith("it did not end within 5 s, and was ended")
