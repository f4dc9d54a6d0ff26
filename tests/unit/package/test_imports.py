"""Imports point down only, and what a person waits for loads neither a framework nor MPI."""

from __future__ import annotations

import json
import os
import shutil
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
# How many files an import, and a start with a first step, open, and what they ask of the file
# system in all, beyond torch's own 34,000 operations; on a cluster thousands of ranks ask at once.
MOST_ASKED = {"imported": (40, 258), "started": (65, 400)}
START = """
import os, torch
weights = torch.nn.Parameter(torch.ones(2))
sgd = torch.optim.SGD([weights], lr=0.1)

def step(optimizer):
    weights.sum().backward()
    optimizer.step()

step(sgd)
os.path.exists("/begin")
import hvdtrain.torch as hvd
os.path.exists("/imported")
hvd.init()
step(hvd.DistributedOptimizer(sgd, [("weights", weights)]))
os.path.exists("/started")
"""


def test_imports_point_down() -> None:
    assert faults(PACKAGE, *BESIDE) == []


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


def test_it_asks_little_of_the_file_system(tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("no strace, which counts what is asked of the file system: apt install strace")
    if subprocess.run(["strace", "-o", os.devnull, "true"], check=False).returncode:
        pytest.skip("strace may not trace here")
    if os.environ.get("PYTHONPATH"):
        pytest.skip("directories of PYTHONPATH are searched first, for every package")
    log, run = tmp_path / "log", [sys.executable, "-c", START]
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(run, env=environ, timeout=300, check=True)  # keeps compiled modules
    trace = ["strace", "-o", str(log), "-e", "trace=%file,fstat,getdents64"]
    subprocess.run([*trace, *run], env=environ, timeout=300, check=True)
    after = log.read_text().partition('"/begin"')[2]
    for end, (most_opens, most) in MOST_ASKED.items():
        asked = after.partition(f'"/{end}"')[0].splitlines()[1:-1]
        opens = [line for line in asked if line.startswith("open")]
        assert most_opens / 2 < len(opens) <= most_opens, opens
        assert len(opens) < len(asked) <= most, asked
