"""Commands whose output goes to one log file."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from hvdtrain.errors import HvdtrainError

# The most relevant kind of line first: what follows a compiler error is mostly noise.
_TELLING = (
    re.compile(
        r": (fatal )?error:|undefined reference|CMake Error|Could NOT find|No space left|Killed"
    ),
    re.compile(r"\berror\b", re.IGNORECASE),
    re.compile(r"\S"),
)
_SHOWN_LINES = 8
_SHOWN_CHARACTERS = 300


class BuildFailedError(HvdtrainError):
    """A command of the build failed; the message has its last relevant lines and names the log."""


class Log:
    """A file to which all commands of a build write."""

    def __init__(self, file: IO[str], path: Path) -> None:
        self._file = file
        self._path = path

    def run(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        on_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Run a command to its end."""
        self._file.write(f"\n$ {' '.join(command)}\n")
        lines: list[str] = []
        with subprocess.Popen(
            command,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None  # it is a pipe
            for line in process.stdout:
                self._file.write(line)
                self._file.flush()
                lines.append(line.rstrip()[:_SHOWN_CHARACTERS])
                on_line(line)
        if process.returncode != 0:
            shown = "".join(f"\n  {line.strip()}" for line in _telling(lines))
            raise BuildFailedError(
                f"{Path(command[0]).name} ended with code {process.returncode}; its output "
                f"is in {self._path}; it ended with:{shown}"
            )


def _telling(lines: Sequence[str]) -> Sequence[str]:
    kinds = ([line for line in lines if kind.search(line)] for kind in _TELLING)
    return next(filter(None, kinds), [])[-_SHOWN_LINES:]
