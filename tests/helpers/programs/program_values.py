"""What a program must give, beside what it gave."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np

Values = Mapping[str, Any]  # by name: an array, or None where there is none


def compare(right: Values, got: Values, bound: float) -> dict[str, Any]:
    """Return whether values are equal to a bound, relative above 1, and the worst if not."""
    if right.keys() != got.keys():
        names = sorted(right.keys() ^ got.keys())
        return _different(names[0], names[0] in right, names[0] in got)
    worst: dict[str, Any] = {"outcome": "equal", "difference": 0.0}
    for name, value in right.items():
        other = got[name]
        if value is None or other is None:
            if value is not other:
                return _different(name, value, other)
            continue
        value, other = np.asarray(value), np.asarray(other)
        if value.shape != other.shape:
            return _different(name, value.shape, other.shape)
        with np.errstate(all="ignore"):
            off = np.abs(other - value) / (1 + np.abs(value))
        same = (value == other) | (np.isnan(value) & np.isnan(other))
        off = np.where(same, 0, np.where(np.isnan(off), np.inf, off))
        largest = float(off.max(initial=0))
        if largest > worst["difference"]:
            worst = {"outcome": "equal", "difference": largest}
            if largest > bound:
                at = int(off.argmax())
                worst = _different(name, value.flat[at], other.flat[at]) | {"difference": largest}
    return worst


def _different(name: str, right: object, got: object) -> dict[str, Any]:
    where = {"where": name, "right": str(right)[:200], "got": str(got)[:200]}
    return {"outcome": "different", "difference": float("inf"), **where}


def digest(values: Values) -> str:
    """Return what is equal on two ranks if all bits of these values are."""
    state = hashlib.blake2b(digest_size=8)
    for value in values.values():
        state.update(np.ascontiguousarray(value).tobytes())
    return state.hexdigest()


def failure(error: Exception, library: str) -> dict[str, Any]:
    """Return what a rank says of an error, which is clear if it is raised by hvdtrain itself."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f"site-packages/{library}" not in f.filename]
    return {
        "outcome": "error",
        "error": f"{type(error).__name__}: {error}",
        "clear": "hvdtrain" in ours[-1].filename and ours[-1] is frames[-1],
        "traceback": "".join(traceback.format_exception(error)),
    }
