"""Apply all rules to a script, and leave out what its comments silence."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

from hvdtrain_lint.rules import communication, outcomes, samples, training
from hvdtrain_lint.rules.rule import RULES, Finding
from hvdtrain_lint.source.script import parse_script, too_deep

# What finds a rule has its code as a name.
FINDERS = {
    RULES[name.upper()]: find
    for module in (communication, outcomes, samples, training)
    for name, find in vars(module).items()
    if name.upper() in RULES
}
_IGNORE = re.compile(r"#\s*hvdtrain:\s*ignore(?:\[([^\]]*)\]|\s+((?:HVD\d+[,\s]*)+))?")


def check_script(path: Path) -> list[Finding]:
    """Return what is wrong with a script, by line."""
    script, text = parse_script(path)
    silenced = _silenced(text)
    findings = set()
    try:
        for rule, find in FINDERS.items():
            for node, what in find(script):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                quiet = [silenced[line] for line in lines if line in silenced]
                if not any(not codes or rule.code in codes for codes in quiet):
                    findings.add(rule.finding(path, node.lineno, what))
    except RecursionError:
        raise too_deep(path) from None
    return sorted(findings)


def _silenced(text: str) -> dict[int, list[str]]:
    """Return the codes that comments silence, by line; no codes stand for all."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        match = _IGNORE.search(token.string) if token.type == tokenize.COMMENT else None
        if match:
            found[token.start[0]] = re.findall(r"HVD\d+", (match[1] or "") + (match[2] or ""))
    return found
