"""`hvdtrain lint`: find what goes wrong when several ranks run a script."""

from __future__ import annotations

import io
import json
import os
import re
import tokenize
from dataclasses import asdict
from pathlib import Path

import click

from hvdtrain.errors import EXIT_CRASH, UsageError
from hvdtrain.world import promised_world
from hvdtrain_lint.rules import communication, outcomes, samples, training
from hvdtrain_lint.rules.rule import RULES, Finding
from hvdtrain_lint.running.start import run_script
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


@click.command()
@click.argument(
    "scripts", nargs=-1, required=True, metavar="SCRIPT...", type=click.Path(path_type=Path)
)
@click.option(
    "--run",
    "steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Also run each script for N steps on 2 ranks, and compare the ranks (PyTorch only).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, nothing else.")
def command(scripts: tuple[Path, ...], steps: int | None, as_json: bool) -> int:
    """Find mistakes with ranks in scripts for Horovod, torch.distributed or Accelerate.

    The scripts are read, and run with --run only. Prints a line for each mistake, with its reason
    and how to fix it, and ends with exit code 1 if there is one. A comment `# hvdtrain: ignore`
    silences a line, `# hvdtrain: ignore HVD401` one rule in it; docs/lint.md lists the rules.
    """
    if steps is not None and promised_world(os.environ) is not None:
        raise UsageError("'lint --run' starts ranks itself: call it without a launcher")
    findings: list[Finding] = []
    errors: list[UsageError] = []
    for script in scripts:
        try:
            findings += check_script(script)
            findings += run_script(script, steps) if steps else []
        except UsageError as error:
            errors.append(error)
    if as_json:
        click.echo(json.dumps({"findings": [asdict(each) for each in findings]}, indent=2))
    else:
        for finding in findings:
            click.echo(str(finding))
        if not findings and not errors:
            click.echo(f"no mistakes found in {len(scripts)} script{'s' * (len(scripts) > 1)}")
    for each in errors[:-1]:
        click.echo(f"hvdtrain: {each}", err=True)
    if errors:
        raise errors[-1]
    return EXIT_CRASH if findings else 0
