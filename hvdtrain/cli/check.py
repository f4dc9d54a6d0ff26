"""`hvdtrain check`: report what is installed and what works, and how to fix what does not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import click

from hvdtrain import __version__
from hvdtrain.check.checks import Section, all_sections
from hvdtrain.check.job import check_job
from hvdtrain.engines import ENGINES
from hvdtrain.errors import EXIT_CRASH, EXIT_INTERRUPTED, UsageError
from hvdtrain.launch.launchers.options import parse_hosts, require_sense
from hvdtrain.launch.launchers.request import LaunchRequest
from hvdtrain.world import refuse_on_ranks

_MARGIN = 12
_PAGE = "the page 'Something went wrong' of the documentation lists messages, with what to do"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, nothing else.")
@click.option("--job", is_flag=True, help="Try the nodes of this allocation, or the named hosts.")
@click.option("-hostfile", "--hostfile", help="With --job: hosts in the MPI's own grammar.")
@click.option("-H", "--hosts", metavar="HOST,...", help="With --job: hosts, instead of a file.")
@click.option("--per-node", type=click.IntRange(1), help="With --job: ranks on each; default: 1.")
@click.option("--timeout", type=click.IntRange(12), help="Seconds for --job; default: 30.")
def command(as_json: bool, job: bool, hosts: str | None, timeout: int | None, **asked: Any) -> int:
    """Look at this installation and try two ranks, or at all nodes of a job.

    Ends with exit code 0 if hvdtrain works here; else with 1, and one line for each thing that is
    wrong and how to fix it.
    """
    refuse_on_ranks("'check'")
    sections: Iterator[Section] = all_sections(tuple(ENGINES))
    if job:
        request = LaunchRequest((), hosts=parse_hosts(hosts), **asked)
        both = "-hostfile and -H both name hosts: leave out one of them"
        require_sense(request, "'check'", "", both)
        sections = map(check_job, [request], [timeout or 30])
    elif hosts or timeout or any(asked.values()):
        raise UsageError("-H, -hostfile, --per-node and --timeout go with --job only: give it, too")
    try:
        return _check(sections, as_json)
    except KeyboardInterrupt:
        print("hvdtrain: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _check(checks: Iterator[Section], as_json: bool) -> int:
    sections = []
    if not as_json:
        click.echo(f"hvdtrain {__version__}")
    for section in checks:
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
