"""The words after `python -m hvdtrain` that each rank runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.errors import UsageError

__all__ = ["OF_RANKS", "is_script", "rank_words", "require_program"]

# The subcommands that ranks run.
OF_RANKS = ("train", "evaluate", "predict", "script")


def is_script(arguments: Sequence[str]) -> bool:
    """Tell whether it names a script: a file of any name, or what looks like one."""
    word = arguments[0] if arguments else ""
    return word.endswith(".py") or (word not in OF_RANKS and os.path.isfile(word))


def require_program(arguments: Sequence[str]) -> None:
    """Raise UsageError if these words are nothing that ranks run."""
    word = arguments[0] if arguments else "train"
    if word.startswith("-") or word in OF_RANKS or is_script(arguments):
        return
    if Path(word).name.startswith("python"):
        raise UsageError(f"ranks run Python already: leave out '{word}', and begin with the script")
    raise UsageError(
        f"'{word}' is nothing that ranks run: name a script, or one of {', '.join(OF_RANKS)}"
    )


def rank_words(arguments: Sequence[str], as_horovod: bool = False) -> list[str]:
    """Return subcommand and arguments for the program that a person has named."""
    script = ["script", *(["--as-horovod"] if as_horovod else [])]
    return [*(script if is_script(arguments) else []), *arguments]
