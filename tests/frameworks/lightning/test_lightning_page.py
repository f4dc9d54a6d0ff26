"""docs/lightning.md: its programs are run on two ranks, and a rank that fails ends the job."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import launch, run_ranks

PAGE = Path(__file__).resolve().parents[3] / "docs" / "lightning.md"
FAILING = """
    def on_train_batch_start(self, batch, index):
        if index == 3 and self.global_rank == 1:
            raise RuntimeError("broken here")
"""


def programs() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_programs_of_the_page(tmp_path: Path) -> None:
    """Run the first one, and then with the strategy of the second one."""
    first, second = programs()
    again = first.replace("import hvdtrain.lightning", second + "import hvdtrain.lightning")
    script = tmp_path / "script.py"
    script.write_text(first + again.replace('strategy="hvdtrain"', "strategy=strategy"))
    done = run_ranks(script, 2, cases_expected=False, warm="torch torchmetrics lightning.pytorch")
    printed = re.findall(r"rank ([01]) of 2: (0\.\d{4})", done.stdout)
    first_rank, second_rank = ([text for rank, text in printed if rank == each] for each in "01")
    assert first_rank == second_rank
    assert len(first_rank) == 2
    assert all(float(text) > 0.9 for text in first_rank)


@pytest.mark.soak
def test_the_older_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    program = programs()[0].replace("import lightning as L", "import pytorch_lightning as L")
    script.write_text(program)
    done = run_ranks(script, 2, cases_expected=False)
    assert len(re.findall(r"rank [01] of 2: 0\.9", done.stdout)) == 2


@pytest.mark.soak
def test_a_rank_that_fails_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        programs()[0].replace("    def training_step", FAILING + "\n    def training_step")
    )
    with launch(script, 2) as job:
        done = job.wait(60)
        assert done.returncode != 0
        assert "[rank 1/2] RuntimeError: broken here" in done.stderr
        job.assert_nothing_left()
