"""What the lint reports: a place in a script, what is wrong there, and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True, order=True)
class Finding:
    """A mistake in a script.

    Attributes:
        path: the script, as it was named.
        line: line number, from 1.
        code: code of the rule.
        reason: what is wrong.
        mend: what to do.
    """

    path: str
    line: int
    code: str
    reason: str
    mend: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.code} {self.reason}; {self.mend}"
