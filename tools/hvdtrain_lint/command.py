"""`hvdtrain lint`: find what goes wrong when several ranks run a script."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import click

from hvdtrain.errors import EXIT_CRASH, UsageError
from hvdtrain.world import promised_world
from hvdtrain_lint.check import check_script
from hvdtrain_lint.rules.rule import Finding
from hvdtrain_lint.running.start import run_script


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
