"""Imports point down only, and what a person waits for loads neither a framework nor MPI."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import hvdtrain_bench
import hvdtrain_lint
import hvdtrain_report
import pytest
from import_rules import faults

import hvdtrain

PACKAGE = Path(hvdtrain.__file__).parent
BESIDE = [
    Path(str(package.__file__)).parent
    for package in (hvdtrain_bench, hvdtrain_lint, hvdtrain_report)
]
HEAVY = {"jax", "keras", "mpi4py", "numpy", "rich", "scipy", "sklearn", "tensorflow", "torch"}
# A start shall take less than 0.3 s of a core of today. It makes 60,000 calls in 80 ms, and their
# number is the same however busy the machine is.
START_LIMIT_CALLS = 200_000
# Counts the calls, and notes what a start would wait for.
COUNTED = """
import json, runpy, sys
WAITS = ("os.exec", "os.fork", "os.posix_spawn", "os.system", "socket.", "subprocess.", "time.")
calls, waits = 0, []

def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")

sys.addaudithook(lambda event, _: waits.append(event) if event.startswith(WAITS) else None)
sys.argv = ["hvdtrain", "--help"]
sys.setprofile(count)
try:
    {start}
except SystemExit as end:
    assert not end.code, end.code
finally:
    sys.setprofile(None)
print(json.dumps([calls, waits]))
"""
# What `python -m hvdtrain --help` does, followed by a look at what it has loaded.
HELP = """
import json, sys
from hvdtrain.cli.main import main
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0, end.code
print(json.dumps(sorted(sys.modules)))
"""


def tree(folder: Path, files: dict[str, str]) -> Path:
    """Write a made-up package named hvdtrain, with an empty __init__.py in each folder."""
    package = folder / "hvdtrain"
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for parent in (path.parent, package):
            (parent / "__init__.py").touch()
    return package


def test_imports_point_down() -> None:
    assert faults(PACKAGE, *BESIDE) == []


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("topology.py", "import hvdtrain.core.x", "foundations must not import core"),
        ("core/a.py", "def f():\n    import hvdtrain.torch.x", "core must not import torch"),
        ("core/a.py", "if TYPE_CHECKING:\n    import hvdtrain.cli.x", "must not import cli"),
        ("train/loop/a.py", "import hvdtrain.train.torch.x", "loop must not import torch"),
        ("train/odd/a.py", "", "no order is known for this folder"),
        ("core/a.py", "from hvdtrain.engines import x", "only engines know a concrete engine"),
        ("surprise/a.py", "", "hvdtrain.surprise.a: no layer is known for it"),
        ("core/a.py", "import hvdtrain.core.gone", "hvdtrain.core.gone, which is not there"),
        ("launch/a.py", "def f():\n    from mpi4py import MPI", "launch must not know it"),
        ("data/a.py", "import torch.utils", "data must import it inside a function"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, name: str, text: str, fault: str) -> None:
    layers = ("engines", "core", "torch", "tensorflow", "train", "train/torch", "cli")
    found = faults(tree(tmp_path, {f"{layer}/x.py": "" for layer in layers} | {name: text}))
    assert any(fault in line for line in found), found


def test_a_cycle_is_found(tmp_path: Path) -> None:
    files = {"core/a.py": "from . import b", "core/b.py": "def f():\n    from .a import x"}
    (fault,) = faults(tree(tmp_path, files))
    assert fault.startswith("cycle: ")


@pytest.mark.parametrize(
    "script",
    [
        "import json, sys, hvdtrain; print(json.dumps(sorted(sys.modules)))",
        "import json, sys, hvdtrain.data; print(json.dumps(sorted(sys.modules)))",
        HELP,
    ],
    ids=["import hvdtrain", "import hvdtrain.data", "--help"],
)
def test_nothing_heavy_is_loaded(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True
    )
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert "hvdtrain" in loaded
    assert {name.partition(".")[0] for name in loaded} & HEAVY == set()


@pytest.mark.parametrize(
    "start",
    ["import hvdtrain", "runpy.run_module('hvdtrain', run_name='__main__', alter_sys=True)"],
    ids=["import hvdtrain", "--help"],
)
def test_it_starts_quickly(start: str) -> None:
    code = COUNTED.format(start=start)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    calls, waits = json.loads(done.stdout.splitlines()[-1])
    assert 1000 < calls < START_LIMIT_CALLS
    assert waits == []
