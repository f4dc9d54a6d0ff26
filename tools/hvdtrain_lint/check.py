"""Apply all rules to a script, and leave out what its comments silence."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Mapping
from pathlib import Path

from hvdtrain_lint.registry import RULES
from hvdtrain_lint.source.finding import Finding
from hvdtrain_lint.source.script import Script, parse_script, too_deep

_IGNORE = re.compile(r"#\s*hvdtrain:\s*ignore(?:\[([^\]]*)\]|\s+((?:HVD\d+[,\s]*)+))?")


def check_script(path: Path) -> list[Finding]:
    """Return what is wrong with a script, by line."""
    script, text = parse_script(path)
    try:
        return _findings(path, script, _silenced(text))
    except RecursionError:
        raise too_deep(path) from None


def _findings(path: Path, script: Script, silenced: Mapping[int, frozenset[str]]) -> list[Finding]:
    findings = set()
    for rule in RULES:
        for found in rule.find(script):
            first = getattr(found.node, "lineno", 1)
            last = getattr(found.node, "end_lineno", None) or first
            quiet = [silenced[line] for line in range(first, last + 1) if line in silenced]
            if not any(not codes or rule.code in codes for codes in quiet):
                reason = f"{found.what}: {rule.reason}"
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
