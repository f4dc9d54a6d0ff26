"""The code of README and of the pages it points at is run, and their tables agree with the code."""

import re
import sys
from pathlib import Path

import pytest
from page_blocks import blocks
from ranks import run_ranks, start
from tensorflow_environment import tensorflow_python

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "torch.md"], ids=lambda p: p.name)
def test_the_loop(page: Path, tmp_path: Path) -> None:
    """README's for Keras is run by the tests of Keras."""
    code, *_ = blocks(page, "python")
    script = tmp_path / "script.py"
    script.write_text(code)
    done = run_ranks(script, 2, cases_expected=False)
    losses = re.findall(r"rank [01]: loss (\d+\.\d+)", done.stdout)
    assert len(losses) == 2
    assert losses[0] == losses[1]
    assert float(losses[0]) < 5.0


def test_the_table_of_options() -> None:
    """It is what the declarations say, and `--help` offers the same."""
    script = DOCS / "options_table.py"
    page = (DOCS / "options.md").read_text(encoding="utf-8")
    table = start([sys.executable, script]).end(code=0)
    assert table.stdout in page, "run docs/options_table.py --write"
    done = start([sys.executable, "-m", "hvdtrain", "train", "--help"]).end(code=0)
    offered = set(re.findall(r"^ +(--[a-z-]+)", done.stdout, re.MULTILINE))
    assert set(re.findall(r"^\| `(--[a-z-]+)` \|", page, re.MULTILINE)) == offered


def test_the_table_of_variables() -> None:
    code = (
        "from dataclasses import fields; from hvdtrain.config import Config\n"
        "for field in fields(Config):\n"
        "    default = int(field.default) if field.type == 'bool' else field.default\n"
        "    text = 'measured' if default is None else 'none' if default == '' else default\n"
        "    print('HVDTRAIN_' + field.name.upper(), text)"
    )
    done = start([sys.executable, "-c", code]).end(code=0)
    page = (DOCS / "variables.md").read_text(encoding="utf-8")
    described = re.findall(r"^\| `(HVDTRAIN_\w+)` \| (\S+) \|", page, re.MULTILINE)
    assert [" ".join(row) for row in described] == done.stdout.splitlines()


def test_the_table_of_horovods_names() -> None:
    table = DOCS / "horovod" / "table.py"
    # It imports the adapters for all frameworks.
    start([tensorflow_python(), table, "--check"]).end(code=0)


def test_the_table_is_what_the_engines_say() -> None:
    done = start([sys.executable, DOCS / "engines_table.py"]).end(code=0)
    assert done.stdout in (DOCS / "engines.md").read_text(), "run docs/engines_table.py --write"
