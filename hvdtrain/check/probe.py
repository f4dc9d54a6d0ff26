"""Run programs in processes of their own, where a crash or a hang is reported as an error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeAlias

# A JSON object; what is in it is up to the program that printed it.
Json: TypeAlias = dict[str, Any]

_GRACE_SECONDS = 5.0


class ProbeError(Exception):
    """A probe gave no answer; the message is one line that says why. `said` is its output."""

    def __init__(self, message: str, said: str = "") -> None:
        super().__init__(message)
        self.said = said


@dataclass(frozen=True)
class Finished:
    """How a command ended and what it wrote."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def answer(self) -> Json | None:
        """The JSON object in the last line of stdout that is one, or None."""
        for line in reversed(self.stdout.splitlines()):
            if line.startswith("{"):
                try:
                    found: Json = json.loads(line)
                except ValueError:
                    continue
                return found
        return None

    @property
    def complaint(self) -> str:
        """One line of stderr: hvdtrain's own message, the end of a traceback, or its first line."""
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


def ask_python(*arguments: str, timeout_seconds: float = 120) -> Json:
    """Run this interpreter and return the JSON object that it prints last."""
    done = finish([sys.executable, *arguments], timeout_seconds)
    if done.returncode == 0 and done.answer is not None:
        return done.answer
    raise ProbeError(f"{done.ending}: {done.complaint}")


def finish(
    argv: Sequence[str],
    timeout_seconds: float,
    variables: Mapping[str, str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Finished:
    """Run a command, and end it and all that it started if it takes too long."""
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**environ, **(variables or {})},
            start_new_session=True,
        )
    except OSError as error:
        raise ProbeError(f"{argv[0]}: {error.strerror}") from error
    try:
        out, err = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {timeout_seconds:.0f} s", _end(process)) from None
    except BaseException:
        _end(process)
        raise
    return Finished(process.returncode, out, err)


def _end(process: subprocess.Popen[str]) -> str:
    """End a process and all that it started, and return their output so far."""
    process.terminate()  # mpirun ends its ranks, which are in sessions of their own
    try:
        return process.communicate(timeout=_GRACE_SECONDS)[0]
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]
