"""docs/from: what stands on the right of a table is in the example that the page names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import run_ranks, start
from tensorflow_environment import keras_variables, tensorflow_python

FROM = Path(__file__).resolve().parents[2] / "docs" / "from"
PAGES = sorted(path for path in FROM.glob("*.md") if path.name != "README.md")
EXAMPLE = re.compile(r"\]\((\.\./\.\./examples/[\w.]+)\)")
# Commands, and options of them.
COMMANDS = ("python ", "mpirun ", "-", "exec ")


def rows(page: Path, head: str) -> list[list[str]]:
    """Return the rows of the tables whose first line ends with a column of this name."""
    found, wanted = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("|"):
            wanted = False
        elif cells[-1].strip("| ") == head:
            wanted = True
        elif wanted and not line.startswith("|---"):
            found.append(cells)
    return found


def flat(text: str) -> str:
    return re.sub(r"\s+", "", text).replace(",)", ")")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_the_lines_of_the_examples(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    examples = [(FROM / name).resolve().read_text() for name in EXAMPLE.findall(text)]
    assert examples
    programs = flat("".join(examples))
    told = rows(page, "here")
    assert len(told) >= 4
    wrong = [
        code
        for *_, cell in told
        for code in re.findall(r"`([^`]+)`", cell)
        if not code.startswith(COMMANDS) and flat(code) not in programs
    ]
    assert not wrong


def test_every_page_is_listed() -> None:
    listed = (FROM / "README.md").read_text(encoding="utf-8")
    assert all(f"]({page.name})" in listed for page in PAGES)


def test_what_tensorflow_and_keras_broke(tmp_path: Path) -> None:
    broken = rows(FROM / "horovod-tensorflow.md", "write")
    assert len(broken) == 5
    lines = [cells[0].strip("`") for cells in broken]
    script = tmp_path / "broken.py"
    script.write_text(
        "import keras\n"
        "import tensorflow as tf\n"
        "model = keras.Sequential([keras.layers.Dense(1)])\n"
        f"for line in {lines!r}:\n"
        "    try:\n"
        "        eval(line)\n"
        "    except Exception as error:\n"
        "        print(f'{type(error).__name__}: {error}')\n"
    )
    with start([tensorflow_python(), script], env=keras_variables()) as job:
        done = job.wait(300)
    assert done.stdout.splitlines() == [cells[1].strip("`") for cells in broken]


@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_hvdtrain_inside_other_libraries(size: int, tmp_path: Path) -> None:
    """One rank and two come to the same numbers: those of all samples."""
    page = (FROM.parent / "other-libraries.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    script = tmp_path / "script.py"
    script.write_text("".join(blocks))
    done = run_ranks(script, size, cases_expected=False, cwd=tmp_path, env={"OMP_NUM_THREADS": 1})
    said = re.findall(r"^(\w+): ([\d.e-]+)(?:, gradient (.*))?$", done.stdout, re.MULTILINE)
    assert len(said) == 3 * size
    found = {name: (float(value), float(gradient or 0)) for name, value, gradient in said}
    assert len(set(said)) == len(found)  # the same on all ranks
    # What one rank comes to.
    assert found["Lightning"][0] == pytest.approx(4.929e-3, rel=0.01)
    assert found["LBFGS"][0] == pytest.approx(0.138, abs=1e-3)
    assert found["contrast"] == pytest.approx((1.235, 1.4301), abs=1e-3)
