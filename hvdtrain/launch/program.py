"""The arguments of `python -m hvdtrain` on each rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.errors import UsageError

# Subcommands that ranks run.
OF_RANKS = ("train", "evaluate", "predict", "script")


def is_script(arguments: Sequence[str]) -> bool:
    """Return whether the first argument is a script: an existing file, or a name with .py."""
    word = arguments[0] if arguments else ""
    return word.endswith(".py") or (word not in OF_RANKS and os.path.isfile(word))


def require_program(arguments: Sequence[str]) -> None:
    """Check that ranks can run these arguments."""
    word = arguments[0] if arguments else "train"
    _refuse_python(arguments)
    if word.startswith("-") or word in OF_RANKS or is_script(arguments):
        return
    raise UsageError(
        f"'{word}' cannot be run by ranks: name a script, or one of {', '.join(OF_RANKS)}"
    )


def _refuse_python(arguments: Sequence[str]) -> None:
    """Raise UsageError for the arguments of a Python interpreter, with what to write instead."""
    words = list(arguments)
    if words and not is_script(words) and Path(words[0]).name.startswith("python"):
        python = words.pop(0)
        if words[:1] not in (["-m"], ["-c"]):
            raise UsageError(
                f"ranks run Python already: leave out '{python}', and begin with the script"
            )
    if words[:2] == ["-m", "hvdtrain"]:
        instead = " ".join(words[2:] or ["train"])
        raise UsageError(f"ranks run 'python -m hvdtrain' already: write -- {instead}")
    if words[:1] == ["-m"]:
        raise UsageError("ranks cannot run a module by name: write -- and the path of its file")
    if words[:1] == ["-c"]:
        raise UsageError(
            "ranks cannot run code from the command line: put it into a file and write -- FILE"
        )


def rank_words(arguments: Sequence[str], as_horovod: bool = False) -> list[str]:
    """Return the subcommand and the arguments with which each rank runs a program."""
    script = ["script", *(["--as-horovod"] if as_horovod else [])]
    return [*(script if is_script(arguments) else []), *arguments]
