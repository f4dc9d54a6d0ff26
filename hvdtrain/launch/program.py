"""The words after `python -m hvdtrain` that each rank runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["OF_RANKS", "is_script", "rank_words"]

# The subcommands that ranks run.
OF_RANKS = ("train", "script")


def is_script(arguments: Sequence[str]) -> bool:
    """Tell whether it names a script: a file of any name, or what looks like one."""
    word = arguments[0] if arguments else ""
    return word.endswith(".py") or (word not in OF_RANKS and Path(word).is_file())


def rank_words(arguments: Sequence[str], as_horovod: bool = False) -> list[str]:
    """Return subcommand and arguments for the program that a person has named."""
    script = ["script", *(["--as-horovod"] if as_horovod else [])]
    return [*(script if is_script(arguments) else []), *arguments]
