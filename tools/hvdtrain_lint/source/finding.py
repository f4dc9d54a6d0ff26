"""What the lint reports: a place in a script, what is wrong there, and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Finding:
    """A mistake in a script."""

    path: str
    line: int
    code: str
    reason: str
    mend: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.code} {self.reason}; {self.mend}"
