"""How figures of a comparison are written. Pure."""

from __future__ import annotations

import math

from hvdtrain_compare.figures.judge import Ratio

_UNKNOWN = "-"
_UNITS = (("us", 1e-6), ("ms", 1e-3), ("s", 1.0))


def time_text(seconds: float | None) -> str:
    """Return a time with its unit: "812 us", "3.41 ms", "2.5 s"."""
    if seconds is None:
        return _UNKNOWN
    unit, size = next(one for one in _UNITS if seconds < one[1] * 1000 or one is _UNITS[-1])
    return f"{seconds / size:.3g} {unit}"


def interval_text(low: float, high: float) -> str:
    """Return an interval of times in one unit: "3.1 to 3.52 ms"."""
    unit, size = next(one for one in _UNITS if high < one[1] * 1000 or one is _UNITS[-1])
    return f"{low / size:.3g} to {high / size:.3g} {unit}"


def bytes_text(nbytes: float | None) -> str:
    """Return a number of bytes with its unit, in powers of 1000."""
    if nbytes is None:
        return _UNKNOWN
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def ratio_text(ratio: Ratio) -> str:
    """Return a ratio, with the smallest and the largest of the repeats if there are several."""
    if ratio.low == ratio.high:
        return f"{ratio.middle:.2f}"
    return f"{ratio.middle:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def noise_text(ratio: Ratio, noise: float) -> str:
    """Return what the ratio of the same code to itself says of the others."""
    return (
        f"the same code took {ratio.low:.2f} to {ratio.high:.2f} of its own time: ratios of "
        f"{1 / noise:.2f} to {noise:.2f} are noise"
    )


def difference_text(difference: float | None) -> str:
    """Return a difference of weights; 0 where all are bitwise equal."""
    if difference is None:
        return _UNKNOWN
    return "0" if difference == 0 else f"{difference:.1e}"


def score_text(name: str, value: float) -> str:
    """Return a score; a metric is a share, the loss is not."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.4f}" if name == "loss" else f"{100 * value:.2f} %"
