"""The code of README and of the pages it points at is run, and their tables agree with the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_ranks, start
from tensorflow_environment import tensorflow_python

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"


def blocks(language: str, page: Path = README) -> list[str]:
    """Return a page's code blocks of a language."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return what a link can name of a page: its headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    broken = []
    for page in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("docs/*/*.md")]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, heading = link.partition("#")
            target = page.parent / name if name else page
            if "://" not in link and not (
                target.exists() and (not heading or heading in anchors(target))
            ):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken


@pytest.mark.parametrize("page", [README, DOCS / "torch.md"], ids=lambda page: str(page.name))
def test_the_loop(page: Path, tmp_path: Path) -> None:
    code, *_ = blocks("python", page)
    script = tmp_path / "script.py"
    script.write_text(code)
    done = run_ranks(script, 2, cases_expected=False)
    losses = re.findall(r"rank [01]: loss (\d+\.\d+)", done.stdout)
    assert len(losses) == 2
    assert losses[0] == losses[1]
    assert float(losses[0]) < 5.0


def test_the_keras_program() -> None:
    """It is that of the page on Keras, which the tests of Keras run."""
    *_, code = blocks("python")
    assert [code] == blocks("python", DOCS / "keras.md")


def test_the_table_of_options() -> None:
    """It is what the declarations say, and `--help` offers the same."""
    script = DOCS / "options_table.py"
    page = (DOCS / "options.md").read_text(encoding="utf-8")
    table = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, check=True
    )
    assert table.stdout in page, "run docs/options_table.py --write"
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "train", "--help"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    offered = set(re.findall(r"^ +(--[a-z-]+)", done.stdout, re.MULTILINE))
    described = set(re.findall(r"^\| `(--[a-z-]+)` \|", page, re.MULTILINE))
    assert described == offered


def test_the_table_of_variables() -> None:
    code = (
        "from dataclasses import fields; from hvdtrain.config import Config\n"
        "for field in fields(Config):\n"
        "    default = int(field.default) if field.type == 'bool' else field.default\n"
        "    text = 'measured' if default is None else 'none' if default == '' else default\n"
        "    print('HVDTRAIN_' + field.name.upper(), text)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    page = (DOCS / "variables.md").read_text(encoding="utf-8")
    described = re.findall(r"^\| `(HVDTRAIN_\w+)` \| (\S+) \|", page, re.MULTILINE)
    assert [" ".join(row) for row in described] == done.stdout.splitlines()


def test_the_table_of_horovods_names() -> None:
    table = DOCS / "horovod" / "table.py"
    # It imports the adapters for all frameworks.
    with start([tensorflow_python(), table, "--check"]) as job:
        done = job.wait(300)
    assert done.returncode == 0, done.stderr


DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_table_is_what_the_engines_say() -> None:
    with start([sys.executable, DOCS / "engines_table.py"]) as job:
        done = job.wait(300)
    assert done.returncode == 0, done.stderr
    assert done.stdout in (DOCS / "engines.md").read_text(), "run docs/engines_table.py --write"
