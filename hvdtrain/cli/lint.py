"""`hvdtrain lint`: find what goes wrong when several ranks run a script."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from hvdtrain.errors import EXIT_CRASH
from hvdtrain.lint.check import check_script

__all__ = ["command"]


@click.command()
@click.argument(
    "scripts", nargs=-1, required=True, metavar="SCRIPT...", type=click.Path(path_type=Path)
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, nothing else.")
def command(scripts: tuple[Path, ...], as_json: bool) -> int:
    """Find mistakes with ranks in scripts for Horovod, torch.distributed or Accelerate.

    The scripts are read, not run. Prints a line for each mistake, with its reason and how to mend
    it, and ends with exit code 1 if there is one. A comment `# hvdtrain: ignore` silences a line,
    `# hvdtrain: ignore HVD401` one rule in it; docs/lint.md lists the rules.
    """
    findings = [finding for script in scripts for finding in check_script(script)]
    if as_json:
        click.echo(json.dumps({"findings": [asdict(each) for each in findings]}, indent=2))
    else:
        for finding in findings:
            click.echo(str(finding))
    return EXIT_CRASH if findings else 0
