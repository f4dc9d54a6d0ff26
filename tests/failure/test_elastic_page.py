"""The commands of docs/elastic.md do what it says."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from paths import ROOT
from ranks import start

_NUMBER = re.compile(r"\d+(\.\d+)?")


@pytest.mark.soak
def test_it_is_tried_in_one_minute(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "elastic.md").read_text(encoding="utf-8")
    commands, output = re.findall(r"^```(?:bash)?\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    script = tmp_path / "commands"
    script.write_text(commands, encoding="utf-8")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with start(["bash", script], env={"PATH": path}) as job:
        done = job.wait(300)
        job.assert_nothing_left()
    assert _NUMBER.sub("N", done.stdout) == _NUMBER.sub("N", output), done.stderr
