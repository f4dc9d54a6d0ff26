"""README's code is run, and its tables agree with the command line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_ranks
from tensorflow_environment import tensorflow_python

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Return README's code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_loop(tmp_path: Path) -> None:
    (code,) = blocks("python")
    script = tmp_path / "script.py"
    script.write_text(code)
    done = run_ranks(script, 2, cases_expected=False)
    losses = re.findall(r"rank [01]: loss (\d+\.\d+)", done.stdout)
    assert len(losses) == 2
    assert losses[0] == losses[1]
    assert float(losses[0]) < 5.0


def test_the_commands_are_there() -> None:
    shell = "".join(blocks("sh"))
    targets = re.findall(r"^make (\w+)", shell, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets == ["train", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


@pytest.mark.parametrize("command", ["train"])
def test_the_table_of_options(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", command, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    offered = set(re.findall(r"^ +(--[a-z-]+)", done.stdout, re.MULTILINE))
    described = set(re.findall(r"^\| `(--[a-z-]+)` \|", README, re.MULTILINE))
    assert described == offered


def test_the_table_of_variables() -> None:
    code = (
        "from dataclasses import fields; from hvdtrain.config import Config\n"
        "for field in fields(Config):\n"
        "    default = int(field.default) if field.type == 'bool' else field.default\n"
        "    text = 'measured' if default is None else default\n"
        "    print('HVDTRAIN_' + field.name.upper(), text)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    described = re.findall(r"^\| `(HVDTRAIN_\w+)` \| (\S+) \|", README, re.MULTILINE)
    assert [" ".join(row) for row in described] == done.stdout.splitlines()


def test_the_table_of_horovods_names() -> None:
    table = ROOT / "docs" / "horovod" / "table.py"
    # It imports the adapters for all frameworks.
    subprocess.run([tensorflow_python(), table, "--check"], timeout=60, check=True)
