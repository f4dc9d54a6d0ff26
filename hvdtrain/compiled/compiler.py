"""The compiler of this machine, for what is compiled when it is used."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence

from hvdtrain.errors import UsageError

# Of C++, in the order in which they are looked for.
COMPILERS = ("c++", "g++", "clang++")


def find_compiler(environ: Mapping[str, str], names: Sequence[str] = COMPILERS) -> tuple[str, ...]:
    """Return the command of the C++ compiler: that of CXX, else the first name on PATH."""
    named = shlex.split(environ.get("CXX", ""))
    for words in [named] if named else [[name] for name in names]:
        if path := shutil.which(words[0], path=environ.get("PATH", "")):
            return (path, *words[1:])
    raise UsageError(
        f"no C++ compiler ({' '.join(named) or ', '.join(names)}): apt install g++, or load your "
        "site's compiler module"
    )
