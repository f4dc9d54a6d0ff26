"""`hvdtrain check`: report what is installed and what works, and how to fix what does not."""

from __future__ import annotations

import json
import sys

import click

from hvdtrain import __version__
from hvdtrain.check.checks import Section, all_sections
from hvdtrain.engines.registry import ENGINES
from hvdtrain.errors import EXIT_CRASH, EXIT_INTERRUPTED
from hvdtrain.world import refuse_on_ranks

_MARGIN = 12
_PAGE = "the page 'Something went wrong' of the documentation lists messages, with what to do"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, nothing else.")
def command(as_json: bool) -> int:
    """Look at this installation and try two ranks.

    Ends with exit code 0 if hvdtrain works here; else with 1, and one line for each thing that is
    wrong and how to fix it.
    """
    refuse_on_ranks("'check'")
    try:
        return _check(as_json)
    except KeyboardInterrupt:
        print("hvdtrain: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _check(as_json: bool) -> int:
    sections = []
    if not as_json:
        click.echo(f"hvdtrain {__version__}")
    for section in all_sections(tuple(ENGINES)):
        sections.append(section)
        if not as_json:
            _show(section)
    problems = [problem for section in sections for problem in section.problems]
    if as_json:
        report = {section.name.lower(): section.facts for section in sections}
        click.echo(json.dumps({"ok": not problems, "problems": problems, **report}, indent=2))
    else:
        for problem in problems:
            click.echo(f"wrong: {problem}")
        click.echo(f"more: {_PAGE}" if problems else "all is well")
    return EXIT_CRASH if problems else 0


def _show(section: Section) -> None:
    names = [section.name, *[""] * (len(section.lines) - 1)]
    for name, line in zip(names, section.lines, strict=True):
        click.echo(f"  {name:{_MARGIN}}{line}")
