"""Questions to interpreters of their own, so that no answer can crash or hang the one who asks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

__all__ = ["Finished", "ProbeError", "ask_python", "finish"]

_GRACE_SECONDS = 5.0


class ProbeError(Exception):
    """A probe gave no answer; the text is one line that says why."""


@dataclass(frozen=True)
class Finished:
    """How a command ended and what it wrote."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def answer(self) -> dict[str, Any] | None:
        """The last line of stdout that is a JSON object."""
        for line in reversed(self.stdout.splitlines()):
            if line.startswith("{"):
                try:
                    found: dict[str, Any] = json.loads(line)
                except ValueError:
                    continue
                return found
        return None

    @property
    def complaint(self) -> str:
        """What stderr says in one line: ours, the end of a traceback, or its first line."""
        lines = [line.rstrip() for line in self.stderr.splitlines()]
        own = [line.removeprefix("hvdtrain: ") for line in lines if line.startswith("hvdtrain: ")]
        frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
        if frames and not own:
            error = (line for line in lines[frames[-1] :] if not line.startswith("  "))
            return " ".join(takewhile(lambda line: line.strip("- "), error))
        said = [line.strip(" :.") for line in lines if line.strip("- \t")]
        return (own or said or ["it said nothing"])[0]

    @property
    def ending(self) -> str:
        """The exit code in words."""
        if self.returncode < 0:
            return f"it died of {signal.Signals(-self.returncode).name}"
        return f"exit code {self.returncode}"


def ask_python(code: str, *arguments: str, timeout_seconds: float = 120) -> dict[str, Any]:
    """Run `code` with this interpreter and return the JSON object that it prints.

    Raises:
        ProbeError: it failed, died, took too long, or printed none.
    """
    done = finish([sys.executable, "-c", code, *arguments], timeout_seconds)
    if done.returncode == 0 and done.answer is not None:
        return done.answer
    raise ProbeError(f"{done.ending}: {done.complaint}")


def finish(
    argv: Sequence[str], timeout_seconds: float, variables: Mapping[str, str] | None = None
) -> Finished:
    """Run a command to its end, and end it and all that it started when that takes too long.

    Args:
        argv: the command line.
        timeout_seconds: how long it may take.
        variables: to set beside the inherited environment.

    Raises:
        ProbeError: it cannot be started, or took too long.
    """
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **(variables or {})},
            start_new_session=True,
        )
    except OSError as error:
        raise ProbeError(f"{argv[0]}: {error.strerror}") from error
    try:
        out, err = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {timeout_seconds:.0f} s") from None
    finally:
        _end(process)
    return Finished(process.returncode, out, err)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is not None:
        return
    process.terminate()  # mpirun takes its ranks along, which run in sessions of their own
    try:
        process.communicate(timeout=_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
