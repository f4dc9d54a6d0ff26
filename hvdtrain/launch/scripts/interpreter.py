"""The options of Python itself, which a script gets too."""

from __future__ import annotations

import sys


def interpreter_options() -> list[str]:
    """Return the options between `python` and `-m hvdtrain`, or the installed command."""
    options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv[1:])]
    return options[:-2] if options[-2:-1] == ["-m"] else options[:-1]
