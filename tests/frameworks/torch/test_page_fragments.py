"""What pages show of a script is run on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

from page_blocks import ROOT, blocks
from ranks import run_ranks, start
from tensorflow_environment import keras_variables, tensorflow_python

WORKER = Path(__file__).with_name("page_fragments_worker.py")


def test_fragments(tmp_path: Path) -> None:
    done = run_ranks(WORKER, 2, cases_expected=False, cwd=tmp_path, timeout_seconds=300)
    ran = re.findall(r"^ran (\S+)$", done.stdout, re.MULTILINE)
    assert len(set(ran)) == 11
    assert len(ran) == 22


def test_the_sharded_optimizer_of_keras(tmp_path: Path) -> None:
    code = blocks(ROOT / "docs/sharded.md", "python")[1]
    script = tmp_path / "script.py"
    script.write_text(f"{code}\nimport numpy as np\nmodel.fit(np.ones([4, 8]), np.ones([4, 1]))\n")
    with start([tensorflow_python(), script], env=keras_variables()) as job:
        done = job.wait(300)
    assert done.returncode == 0, done.stderr
