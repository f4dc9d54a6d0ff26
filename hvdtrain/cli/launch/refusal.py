"""The end of a rank that has an error which other ranks may not have."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

import click

from hvdtrain.errors import EXIT_USAGE
from hvdtrain.world import promised_world

# Head start of rank 0 in reporting an error that all ranks have; the launcher then ends the others.
_HEAD_START_SECONDS = 5.0


def refuse_locally(message: str) -> NoReturn:
    """Report an error and exit, without waiting for ranks that may not have it."""
    promised = promised_world(os.environ)
    if promised is not None and promised.rank > 0:
        time.sleep(_HEAD_START_SECONDS)
    click.echo(f"hvdtrain: {message}", err=True)
    sys.exit(EXIT_USAGE)
