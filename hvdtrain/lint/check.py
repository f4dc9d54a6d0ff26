"""Apply all rules to a script, and leave out what its comments silence."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.lint.registry import RULES
from hvdtrain.lint.source.script import parse_script

__all__ = ["Finding", "check_script"]

_IGNORE = re.compile(r"#\s*hvdtrain:\s*ignore(?:\[([^\]]*)\]|\s+((?:HVD\d+[,\s]*)+))?")


@dataclass(frozen=True, order=True)
class Finding:
    """A mistake in a script.

    Attributes:
        path: the script, as it was named.
        line: line number, from 1.
        code: code of the rule.
        reason: what is wrong.
        mend: what to do.
    """

    path: str
    line: int
    code: str
    reason: str
    mend: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.code} {self.reason}; {self.mend}"


def check_script(path: Path) -> list[Finding]:
    """Return what is wrong with a script, by line.

    Raises:
        UsageError: it cannot be read, or is not Python.
    """
    script, text = parse_script(path)
    silenced = _silenced(text)
    findings = set()
    for rule in RULES:
        for found in rule.find(script):
            first = getattr(found.node, "lineno", 1)
            last = getattr(found.node, "end_lineno", None) or first
            quiet = [silenced[line] for line in range(first, last + 1) if line in silenced]
            if not any(not codes or rule.code in codes for codes in quiet):
                reason = f"{found.what}, {rule.reason}"
                findings.add(Finding(str(path), first, rule.code, reason, rule.mend))
    return sorted(findings)


def _silenced(text: str) -> Mapping[int, frozenset[str]]:
    """Return the codes that comments silence, by line; no codes stand for all."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        match = _IGNORE.search(token.string) if token.type == tokenize.COMMENT else None
        if match:
            codes = re.findall(r"HVD\d+", (match[1] or "") + (match[2] or ""))
            found[token.start[0]] = frozenset(codes)
    return found
