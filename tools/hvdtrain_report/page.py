"""Rendering of runs as one HTML page: text and tables by Jinja, the numbers as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain_report.curves import Curve
from hvdtrain_report.document import asset, own_script, render, require_jinja, write_document
from hvdtrain_report.ranks import CPU, MEMORY, TimeBreakdown
from hvdtrain_report.run import COLUMNS, JOIN_COLUMNS, Change, RunFiles, distinct_names
from hvdtrain_report.tables import confusions, facts, final_split, side_by_side, verdict

if TYPE_CHECKING:
    from markupsafe import Markup

_STYLES = ("uplot.min.css", "page.css")
_SCRIPTS = (
    *("format.js", "theme.js", "reading.js", "plot.js", "curves.js", "controls.js", "ranks.js"),
    *("system.js", "matrix.js"),
)
_LOST = (
    "Training continued with the remaining ranks. Ranks have the numbers that they had then. "
    "Broken lines in the curves show when it was."
)
_JOINED = (
    "Training continued with more ranks. Ranks have the numbers that they had then. "
    "Dotted lines in the curves show when it was."
)
# JSON escapes of characters that could end the element with the data.
_ESCAPES = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


def write_page(runs: Sequence[RunFiles], path: Path) -> int:
    """Write the page atomically, and return its size in bytes."""
    return write_document(path, page_of(runs))


def page_of(runs: Sequence[RunFiles]) -> str:
    require_jinja("report")
    names = distinct_names([run.path for run in runs])
    return render(
        asset("page.html"),
        "".join(map(asset, _STYLES)),
        [asset("uplot.min.js"), own_script(*_SCRIPTS)],
        names=names,
        runs=runs,
        facts=facts(runs),
        result=final_split(runs[0]),
        verdicts=[verdict(run.ranks, run.hosts) if run.ranks else None for run in runs],
        changes=(
            ("losses", "Ranks lost", _LOST, COLUMNS, [run.failures for run in runs]),
            ("joins", "Ranks joined", _JOINED, JOIN_COLUMNS, [run.joins for run in runs]),
        ),
        confusions=[[confusions(matrix) for matrix in run.measured.matrices] for run in runs],
        tables={
            "Configuration": side_by_side([run.config for run in runs]),
            "Environment": side_by_side([run.environment for run in runs]),
            # Results always differ.
            "Summary": side_by_side([run.summary for run in runs], mark=False),
        },
        data=_embedded({"runs": [_data(n, r) for n, r in zip(names, runs, strict=True)]}),
        now=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )


def _embedded(data: object) -> Markup:
    """Return JSON, escaped so that no name in it can end its element."""
    from markupsafe import Markup

    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return Markup(text.translate(_ESCAPES))


def _data(name: str, run: RunFiles) -> dict[str, object]:
    return {
        "name": name,
        "curves": [_curve(curve) for curve in run.measured.curves],
        "losses": _places(run.failures),
        "joins": _places(run.joins),
        "ranks": _ranks(run.ranks) if run.ranks else None,
        "matrices": [
            {"split": found.split, "metric": found.metric, "rows": found.rows}
            for found in run.measured.matrices
        ],
    }


def _places(changes: Sequence[Change]) -> dict[str, list[float | None]]:
    return {
        axis: _nulls([getattr(change, axis) for change in changes])
        for axis in ("step", "epoch", "seconds")
    }


def _curve(curve: Curve) -> dict[str, object]:
    return {
        "split": curve.split,
        "metric": curve.metric,
        "step": curve.step,
        "epoch": _nulls(curve.epoch),
        "seconds": _nulls(curve.seconds),
        "value": _nulls(curve.value),
        "notFinite": curve.not_finite,
    }


def _ranks(times: TimeBreakdown) -> dict[str, object]:
    """Return the times in whole milliseconds: their digits would otherwise be most of the page."""
    intervals = times.intervals
    return {
        "step": [interval.step for interval in intervals],
        "start": [round(interval.seconds - interval.length, 3) for interval in intervals],
        "end": [round(interval.seconds, 3) for interval in intervals],
        "milliseconds": [[_milli(part) for part in interval.parts] for interval in intervals],
        "totals": [_milli(part) for part in times.totals],
        "system": {
            name: [interval.system[name] for interval in intervals] for name in (CPU, *MEMORY)
        },
    }


def _milli(seconds: Sequence[float]) -> list[int]:
    return [round(1000 * each) for each in seconds]


def _nulls(values: Sequence[float]) -> list[float | None]:
    """Return the values for JSON, which has no NaN."""
    return [value if math.isfinite(value) else None for value in values]
