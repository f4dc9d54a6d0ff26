"""What must hold for a hostfile before a launcher sees it."""

from __future__ import annotations

import re
from pathlib import Path

from hvdtrain.errors import UsageError

__all__ = ["require_hostfile"]

_PLACEHOLDER = re.compile(r"\bname_of_node\d+\b")


def require_hostfile(path: str) -> None:
    """Refuse a file that launchers meet with a hang, a riddle or ranks on the wrong host.

    Raises:
        UsageError: it is missing, not a file, unreadable, names no host, or is still a template.
    """
    if not Path(path).exists():
        raise UsageError(f"hostfile {path} does not exist: see hostfiles/ for templates")
    if not Path(path).is_file():
        raise UsageError(f"hostfile {path} is not a file: name a text file, one host per line")
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"hostfile {path} cannot be read: {error}") from error
    hosts = {number: text for number, line in enumerate(lines, 1) if (text := _uncomment(line))}
    if not hosts:
        raise UsageError(f"hostfile {path} names no host: write one host per line")
    for number, text in hosts.items():
        if match := _PLACEHOLDER.search(text):
            raise UsageError(
                f"{path}:{number}: {match[0]} is a placeholder: put the name of a host there"
            )


def _uncomment(line: str) -> str:
    return line.partition("#")[0].strip()
