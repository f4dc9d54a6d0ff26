"""docs/lightning.md: its programs are run on two ranks, and a rank that fails ends the job."""

import re
from pathlib import Path

import pytest
from page_blocks import ROOT, blocks
from ranks import launch, run_ranks

PROGRAMS = blocks(ROOT / "docs" / "lightning.md", "python")


def test_the_programs_of_the_page(tmp_path: Path) -> None:
    """Run the first one, and then with the strategy of the second one."""
    first, second = PROGRAMS
    again = first.replace("import hvdtrain.lightning", second + "import hvdtrain.lightning")
    script = tmp_path / "script.py"
    script.write_text(first + again.replace('strategy="hvdtrain"', "strategy=strategy"))
    done = run_ranks(script, 2, cases_expected=False, warm="torch torchmetrics lightning.pytorch")
    printed = re.findall(r"rank ([01]) of 2: (0\.\d{4})", done.stdout)
    first_rank, second_rank = ([text for rank, text in printed if rank == each] for each in "01")
    assert first_rank == second_rank
    assert len(first_rank) == 2
    assert all(float(text) > 0.9 for text in first_rank)


def assert_rank_1_ends_the_job(statement: str, strategy: str, message: str, script: Path) -> None:
    """Run the first program with a statement that rank 1 reaches in its fourth step."""
    step = "def training_step(self, batch, _):\n"
    reached = f"{step}        if self.global_step == 3 and self.global_rank == 1:\n"
    program = PROGRAMS[0].replace(step, f"{reached}            {statement}\n")
    script.write_text(program.replace('strategy="hvdtrain"', strategy))
    with launch(script, 2, env={"HVDTRAIN_SHARED_MEMORY": "0"}) as job:
        done = job.wait(300)
        assert done.returncode != 0
        assert f"[rank 1/2] RuntimeError: {message}" in done.stderr
        assert "[rank 1/2] During handling" not in done.stderr
        job.assert_nothing_left()


@pytest.mark.soak
def test_a_rank_that_fails_ends_the_job(tmp_path: Path) -> None:
    """Without shared memory, where a sharded state is whole on all ranks together only."""
    strategy = "strategy=hvdtrain.lightning.HvdStrategy(sharded=True)"
    statement = 'raise RuntimeError("broken here")'
    assert_rank_1_ends_the_job(statement, strategy, "broken here", tmp_path / "script.py")


@pytest.mark.soak
def test_a_rank_without_a_loss_ends_the_job(tmp_path: Path) -> None:
    """Lightning refuses it; with a loss scaler this rank would skip a step that others take."""
    scaled = 'L.pytorch.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))'
    strategy = f'strategy="hvdtrain", plugins={scaled}'
    message = "Skipping the `training_step` by returning None"
    assert_rank_1_ends_the_job("return None", strategy, message, tmp_path / "script.py")
