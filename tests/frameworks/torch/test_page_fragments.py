"""What pages show of a script is run on two ranks."""

import re
from pathlib import Path

import pytest
from page_blocks import ROOT, blocks
from ranks import run_ranks, start
from tensorflow_environment import keras_variables, tensorflow_python

WORKER = Path(__file__).with_name("page_fragments_worker.py")


def test_fragments(tmp_path: Path) -> None:
    done = run_ranks(WORKER, 2, cases_expected=False, cwd=tmp_path, timeout_seconds=300)
    ran = re.findall(r"^ran (\S+)$", done.stdout, re.MULTILINE)
    assert len(set(ran)) == 5
    assert len(ran) == 10


def test_the_sharded_optimizer_of_keras(tmp_path: Path) -> None:
    code = blocks(ROOT / "docs/sharded.md", "python")[1]
    script = tmp_path / "script.py"
    script.write_text(f"{code}\nimport numpy as np\nmodel.fit(np.ones([4, 8]), np.ones([4, 1]))\n")
    start([tensorflow_python(), script], env=keras_variables()).end(code=0)


def test_ranks_get_what_one_gets_with_whole_batches() -> None:
    # Of the 40 samples in the last batch 13, 13 and 14 are for each rank.
    done = run_ranks(Path(__file__).with_name("data_page_worker.py"), 3, warm="torch")
    assert done.results == [done.results[0]] * 3


@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_a_contrastive_loss(size: int, tmp_path: Path) -> None:
    """One rank and two come to the same numbers: those of all samples."""
    (code,) = blocks(ROOT / "docs" / "other-libraries.md", "python")
    script = tmp_path / "script.py"
    script.write_text(code)
    done = run_ranks(script, size, cases_expected=False, cwd=tmp_path, env={"OMP_NUM_THREADS": 1})
    said = re.findall(r"^contrast: ([\d.]+), gradient ([\d.]+)$", done.stdout, re.MULTILINE)
    assert len(said) == size
    assert len(set(said)) == 1  # the same on all ranks
    assert [float(number) for number in said[0]] == pytest.approx([1.6948, 1.8496], abs=1e-3)
