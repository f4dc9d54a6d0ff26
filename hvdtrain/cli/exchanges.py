"""`hvdtrain exchanges`: list what ranks can send one another in each step, with all options."""

from __future__ import annotations

import inspect
import json
import textwrap

import click

from hvdtrain.core.exchanges.catalog import EXCHANGES, exchange_options
from hvdtrain.core.gradients.exchange import Exchange, ExchangeOption

_WIDTH, _MARGIN = 100, 15


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, nothing else.")
def command(as_json: bool) -> None:
    """List the exchanges: what ranks can send one another in each step, and the options.

    A name with options is the value of --exchange of train, and of exchange= of a
    DistributedOptimizer: --exchange average:warmup=10
    """
    if as_json:
        click.echo(json.dumps({name: _facts(name, kind) for name, kind in EXCHANGES.items()}))
        return
    for name, kind in EXCHANGES.items():
        options = ", ".join(_text(option) for option in exchange_options(name).values())
        for title, text in ((name, _line(kind)), ("", f"options: {options}")):
            click.echo(
                textwrap.fill(
                    text,
                    _WIDTH,
                    initial_indent=f"{title:{_MARGIN}}",
                    subsequent_indent=" " * _MARGIN,
                    break_on_hyphens=False,
                )
            )


def _line(kind: type[Exchange]) -> str:
    """Return the first paragraph of the documentation of an exchange as one line."""
    return " ".join(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].split())


def _text(option: ExchangeOption) -> str:
    default = "required" if option.required else str(option.default).lower()
    return f"{option.name} ({option.kind.__name__}, {default})"


def _facts(name: str, kind: type[Exchange]) -> dict[str, object]:
    options = {
        option.name: {
            "type": option.kind.__name__,
            "default": option.default,
            "required": option.required,
        }
        for option in exchange_options(name).values()
    }
    return {"text": _line(kind), "options": options}
