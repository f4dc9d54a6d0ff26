"""What must hold for a hostfile before a launcher sees it."""

from __future__ import annotations

import re
from pathlib import Path

from hvdtrain.errors import UsageError

__all__ = ["require_grammar", "require_hostfile"]

_PLACEHOLDER = re.compile(r"\bname_of_node\d+\b")
_COLON = re.compile(r"[^\s:]+:\d+(?!\S)")
_SLOTS = re.compile(r"\bslots\s*=\s*(\S*)")


def require_hostfile(path: str) -> None:
    """Refuse a file that launchers meet with a hang, a riddle or ranks on the wrong host.

    Raises:
        UsageError: it is missing, not a file, unreadable, names no host, or is still a template.
    """
    if not Path(path).exists():
        raise UsageError(f"hostfile {path} does not exist: see hostfiles/ for templates")
    if not Path(path).is_file():
        raise UsageError(f"hostfile {path} is not a file: name a text file, one host per line")
    hosts = _hosts(path)
    if not hosts:
        raise UsageError(f"hostfile {path} names no host: write one host per line")
    for number, line in hosts.items():
        if match := _PLACEHOLDER.search(_uncomment(line)):
            raise UsageError(
                f"{path}:{number}: {match[0]} is a placeholder: put the name of a host there"
            )


def require_grammar(path: str, vendor: str) -> None:
    """Refuse what is written for another MPI than `vendor`, or what this one meets with a riddle.

    Raises:
        UsageError: a line is not in the grammar of this MPI's hostfiles.
    """
    objection = _open_mpi_objection if vendor == "openmpi" else _mpich_objection
    for number, line in _hosts(path).items():
        if reason := objection(line):
            raise UsageError(f"{path}:{number}: {reason}")


def _open_mpi_objection(line: str) -> str:
    text = _uncomment(line)
    if match := _COLON.match(text):
        host, _, count = match[0].partition(":")
        return f"Open MPI takes {match[0]} for a host's name: write '{host} slots={count}'"
    slots = _SLOTS.search(text)
    if slots and not (slots[1].isdecimal() and int(slots[1]) > 0):
        return f"slots={slots[1]} must be a number, at least 1"
    return ""


def _mpich_objection(line: str) -> str:
    if slots := _SLOTS.search(_uncomment(line)):
        return f"slots= is Open MPI's form: write '{line.split()[0]}:{slots[1]}'"
    return "MPICH takes a comment only in a line of its own" if "#" in line else ""


def _hosts(path: str) -> dict[int, str]:
    """Return the lines that name a host, by number."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"hostfile {path} cannot be read: {error}") from error
    return {number: line for number, line in enumerate(lines, 1) if _uncomment(line)}


def _uncomment(line: str) -> str:
    return line.partition("#")[0].strip()
