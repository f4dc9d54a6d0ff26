"""The versions of PyTorch that hvdtrain.torch works with."""

from __future__ import annotations

import re

from hvdtrain.errors import UsageError

__all__ = ["require_torch"]

_OLDEST = (2, 4)


def require_torch(version: str) -> None:
    """Check the version of PyTorch.

    Raises:
        UsageError: it is too old.
    """
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise UsageError(
            f"hvdtrain.torch needs PyTorch >= {oldest}, found {version}: "
            f"pip install 'torch>={oldest}'"
        )
