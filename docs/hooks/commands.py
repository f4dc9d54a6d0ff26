"""Hook of MkDocs: makes the page about the commands, from what their own --help prints."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import click
from mkdocs.structure.files import File, Files

from hvdtrain.cli.main import group

__all__ = ["on_files"]

_SIGNS = re.compile(r"[<>&*_\[\]|\\]")
_PAGE = "reference/commands.md"
_HEAD = """# Commands

`hvdtrain` and `python -m hvdtrain` are the same. Without a command, `train digits` is meant. [Exit
codes](../variables.md#exit-codes) say how a command has ended.

"""


def on_files(files: Files, config: Any) -> Files:
    """Add the page."""
    text = _HEAD + "\n\n".join(map(_section, _contexts(click.Context(group, info_name="hvdtrain"))))
    files.append(File.generated(config, _PAGE, content=text))
    return files


def _contexts(ctx: click.Context) -> Iterator[click.Context]:
    """Yield the context of a command, and those of all below it."""
    yield ctx
    if isinstance(ctx.command, click.Group):
        for name in ctx.command.list_commands(ctx):
            command = ctx.command.get_command(ctx, name)
            assert command is not None
            yield from _contexts(click.Context(command, info_name=name, parent=ctx))


def _section(ctx: click.Context) -> str:
    """Return what there is to say about a command: its help, and a table of its options."""
    command = ctx.command
    depth = "#" * (1 + len(ctx.command_path.split()))
    lines = [f"{depth} {ctx.command_path}", "", "```text", _usage(ctx), "```", ""]
    lines += [_entities(inspect.cleandoc(command.help or "").replace("\b\n", ""))]
    rows = list(_rows(ctx))
    if rows:
        lines += ["", "| option | meaning |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _usage(ctx: click.Context) -> str:
    return " ".join(ctx.command.get_usage(ctx).removeprefix("Usage: ").split())


def _rows(ctx: click.Context) -> Iterator[str]:
    for parameter in ctx.command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None:
            name, text = (" ".join(each.split()) for each in record)
            yield f"| <code>{_entities(name)}</code> | {_entities(text)} |"


def _entities(text: str) -> str:
    """Return text that neither HTML nor Markdown takes for more; code in backticks stays code."""
    parts = text.split("`")
    parts[::2] = [_SIGNS.sub(lambda sign: f"&#{ord(sign[0])};", part) for part in parts[::2]]
    return "`".join(parts)
