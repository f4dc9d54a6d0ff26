"""The sign that a run was stopped before its end, for the script of the job to start it again."""

from __future__ import annotations

from pathlib import Path

__all__ = ["MARKER", "leave_marker", "remove_marker"]

MARKER = "requeue"


def leave_marker(directory: Path, text: str) -> None:
    """Write the file, after the checkpoint that it promises (rank 0 only)."""
    (directory / MARKER).write_text(f"{text}\n", encoding="utf-8")


def remove_marker(directory: Path) -> None:
    """Remove the file of an earlier start (rank 0 only)."""
    (directory / MARKER).unlink(missing_ok=True)
