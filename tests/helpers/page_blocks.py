"""Code on pages: the blocks, the command lines among them, and how hvdtrain's own are parsed."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from hvdtrain.cli.main import group

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("docs/**/*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))]
    + [ROOT / folder / "README.md" for folder in ("benchmarks", "examples", "hostfiles")]
)
# Indented lines, and what is typed in transcripts.
_INDENTED = re.compile(r"^(?:    |\$ )((?:mpirun .*)?python -m hvdtrain\b.*)$", re.MULTILINE)
_OURS = ["python", "-m", "hvdtrain"]
# Commands whose own arguments are a command line again, or a script with its arguments.
_NESTING = ("run", "job")


def blocks(page: Path, *languages: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    found = "|".join(languages)
    return re.findall(rf"^```(?:{found})\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def command_lines(page: Path) -> Iterator[str]:
    """Yield the lines of all blocks for a shell, and hvdtrain's own of other blocks."""
    for block in blocks(page, "sh"):
        yield from (line for line in block.replace("\\\n", " ").splitlines() if line.strip())
    yield from _INDENTED.findall(page.read_text(encoding="utf-8"))


def words(line: str) -> list[str]:
    """Return the words of a command, without variables before it and redirections after it."""
    found = re.split(r" (?:[0-9]?>|&|\||;)", line)[0]
    parts = shlex.split(found, comments=True)
    while parts and re.match(r"[A-Z_]+=", parts[0]):
        del parts[0]
    return parts


def parse(parts: Sequence[str]) -> bool:
    starts = [at for at in range(len(parts)) if list(parts[at : at + 3]) == _OURS]
    if not starts:
        return False
    _parse_own(list(parts[starts[0] + 3 :]))
    return True


def _parse_own(arguments: list[str]) -> None:
    ctx: click.Context = group.make_context("hvdtrain", arguments)
    while isinstance(ctx.command, click.Group):
        left = [*ctx._protected_args, *ctx.args]
        name, command, rest = ctx.command.resolve_command(ctx, left)
        assert command is not None
        ctx = command.make_context(name, rest, parent=ctx)
    if ctx.info_name in _NESTING:
        inner = list(ctx.params.get("arguments", ()))
        if inner and inner[0] != "python" and not inner[0].endswith(".py"):
            _parse_own(inner)
