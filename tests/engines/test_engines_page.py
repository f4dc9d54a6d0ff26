"""The table in docs/engines.md says what the engines say."""

from __future__ import annotations

import sys
from pathlib import Path

from ranks import start

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_table_is_what_the_engines_say() -> None:
    with start([sys.executable, DOCS / "engines_table.py"]) as job:
        done = job.wait(300)
    assert done.returncode == 0, done.stderr
    assert done.stdout in (DOCS / "engines.md").read_text(), "run docs/engines_table.py --write"
