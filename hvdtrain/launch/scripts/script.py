"""A script, or a module, with its arguments: what it imports, and the command line that runs it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UsageError


def interpreter_options() -> list[str]:
    """Return the options between `python` and `-m hvdtrain`, or the installed command."""
    options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv[1:])]
    return options[:-2] if options[-2:-1] == ["-m"] else options[:-1]


# transformers' Trainer is built on Accelerate.
_ACCELERATE = {"accelerate", "transformers"}
_WATCH = ("-m", "hvdtrain.launch.scripts.watched")


@dataclass(frozen=True)
class Script:
    """What a rank runs."""

    program: tuple[str, ...]
    arguments: tuple[str, ...] = ()

    @classmethod
    def parse(cls, words: Sequence[str]) -> Script:
        """Return the script of a command line."""
        if not words:
            raise UsageError("which script? Name one, or a module with -m, or pass --print")
        count = 2 if words[0] == "-m" else 1
        if len(words) < count:
            raise UsageError("which module? Name it after -m")
        if count == 1 and not Path(words[0]).is_file():
            raise UsageError(f"there is no file {words[0]}: name an existing script")
        return cls(tuple(words[:count]), tuple(words[count:]))

    def uses_accelerate(self) -> bool:
        """Return whether its own text imports Accelerate, or transformers, whose Trainer does."""
        path = self._file()
        if path is None:
            return False
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):  # the script's own matter
            return False
        names = [
            name
            for node in ast.walk(tree)
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom) and not node.level
                else []
            )
        ]
        return any(name.partition(".")[0] in _ACCELERATE for name in names)

    def command(self, local_rank: str | None = None, watched: bool = False) -> list[str]:
        """Return the command line, with the options of this process's interpreter."""
        watch = _WATCH if watched else ()
        first = [] if local_rank is None else [local_rank]
        options = interpreter_options()
        return [sys.executable, *options, *watch, *self.program, *first, *self.arguments]

    def _file(self) -> Path | None:
        """Return the file of the program, if it is found without importing a package."""
        if self.program[0] != "-m":
            return Path(self.program[0])
        for folder in sys.path:
            module = Path(folder, *self.program[1].split("."))
            for path in (module.with_name(f"{module.name}.py"), module / "__main__.py"):
                if path.is_file():
                    return path
        return None
