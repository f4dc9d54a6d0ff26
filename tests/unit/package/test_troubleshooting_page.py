"""The page of messages quotes what the code says: each message is one text in it."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
OWN = PAGE.partition("\n## Messages of mpirun, ssh and pip\n")[0]
MESSAGES = re.findall(r"^\| `([^`]+)` \|", OWN, re.MULTILINE)
VALUE = "\0"  # in place of what differs each time


@functools.cache
def texts() -> list[str]:
    """Return the strings in hvdtrain's code, without the values that are put in."""
    found = []
    folders = [ROOT / "hvdtrain", *ROOT.glob("benchmarks/hvdtrain_*"), ROOT / "tools"]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else VALUE for part in node.values
                ]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_in_the_code(message: str) -> None:
    # A quoted value has its marks from its repr.
    parts = [re.escape(part.strip("'")) for part in message.split("…")]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    assert any(pattern.search(text) for text in texts()), message


def test_the_page_has_the_messages_that_it_is_for() -> None:
    assert len(MESSAGES) == len(set(MESSAGES)) >= 50
