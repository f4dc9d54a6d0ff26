"""Tracebacks of hvdtrain's errors in a script: they end in the line of the script."""

import re
from pathlib import Path
from textwrap import indent

from job import Completed
from ranks import launch

# Ranks run different numbers of steps: the error comes out of backward(), through torch.
UNEVEN = """\
import torch
import hvdtrain.torch as hvd
from hvdtrain.core import exits

exits._REPORT_SECONDS = 600.0  # for which rank 0, which has left, waits for the other's traceback
hvd.init()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for _ in range(1 + hvd.rank()):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
DIFFERENT = UNEVEN.replace("Linear(8, 1)", "Linear(8, 1 + hvd.rank())")
# An error of the script itself, in a call of hvdtrain's, keeps every frame.
BROKEN = "import hvdtrain.torch as hvd\nhvd.init()\nhvd.allreduce('text' * hvd.rank())\n"


def end(code: str, folder: Path) -> Completed:
    script = folder / "script.py"
    script.write_text(code)
    return launch(script, 2).end(code=1)


def frames(done: Completed) -> list[tuple[str, str]]:
    return re.findall(r'File "([^"]+)", line \d+, in .+\n\[rank ./2\]     (.+)', done.stderr)


def test_different_numbers_of_steps(tmp_path: Path) -> None:
    done = end(UNEVEN, tmp_path)
    assert frames(done) == [(str(tmp_path / "script.py"), UNEVEN.splitlines()[10].strip())]
    assert "rank 0 left the job while others were in optimizer step 'plan" in done.stderr
    assert "Let every rank run the same number of steps and end together" in done.stderr


def test_a_library_between_the_script_and_hvdtrain(tmp_path: Path) -> None:
    """Its frames are shown: the mistake may be there."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "trainer.py").write_text("def fit():\n" + indent(DIFFERENT, "    "))
    added = f"import sys\nsys.path.insert(0, {str(folder)!r})\nimport trainer\n"
    done = end(f"{added}trainer.fit()\n", tmp_path)
    own = (str(tmp_path / "script.py"), "trainer.fit()")
    assert set(frames(done)) == {own, (str(folder / "trainer.py"), DIFFERENT.splitlines()[8])}
    what = "DistributedOptimizer: parameter 'weight': shape (2, 8), but rank 0 has (1, 8)"
    assert f"MismatchError: [rank 1/2] {what}. Build the same model on every rank" in done.stderr


def test_what_is_not_an_error_of_hvdtrains(tmp_path: Path) -> None:
    assert len(frames(end(BROKEN, tmp_path))) > 1
