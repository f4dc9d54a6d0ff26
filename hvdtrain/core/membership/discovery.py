"""Hosts and their slots, as Horovod's discovery scripts print them."""

from __future__ import annotations

import os
import socket
import subprocess

from hvdtrain.errors import HvdtrainError

__all__ = ["discover", "parse_slots"]

_LIMIT_SECONDS = 30.0


def discover(program: str) -> dict[str, int]:
    """Run a program that prints the hosts of a job, and return the slots of each (local).

    Args:
        program: executable file.

    Raises:
        HvdtrainError: it cannot be run, fails, or prints something else.
    """
    try:
        done = subprocess.run(
            [os.path.abspath(program)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HvdtrainError(f"{program} cannot be run: {error}") from error
    if done.returncode != 0:
        text = done.stderr.strip().rpartition("\n")[2]
        raise HvdtrainError(f"{program} failed with exit code {done.returncode}: {text}")
    return parse_slots(done.stdout, program, socket.gethostname())


def parse_slots(text: str, program: str, here: str) -> dict[str, int]:
    """Return the slots of each host in lines HOST:SLOTS; 1 where there is only a name.

    Args:
        text: the lines.
        program: what has printed them, for errors.
        here: name of this host, which may also be called localhost.

    Raises:
        HvdtrainError: a line is something else.
    """
    found: dict[str, int] = {}
    for line in text.split("\n"):
        name, colon, slots = line.strip().partition(":")
        if not name and not colon:
            continue
        count = slots if colon else "1"
        if not name or not count.isdecimal() or not name.isprintable():
            raise HvdtrainError(f"{program} printed {line.strip()!r}: print lines HOST:SLOTS")
        host = here if name in ("localhost", "127.0.0.1") else name
        found[host] = found.get(host, 0) + int(count)
    return found
