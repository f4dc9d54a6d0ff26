"""docs/exchanges/measured.md says what the records of the measured exchanges say."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[3] / "docs"
CURVES = {
    "average": [[[0, 0.0, 5.0], [10, 2.0, 1.0]], [[0, 0.0, 5.0], [10, 2.0, 2.0]]],
    "diloco:steps=4": [[[0, 0.0, 5.0], [10, 1.0, 1.5]], [[0, 0.0, 5.0], [10, 1.0, 2.5]]],
}
TIMES = {
    "no communication": [0.25, 0.25],
    "average": [1.0, 1.0],
    "average again": [1.0, 1.0],
    "nbit:bits=1": [0.5, 0.4],
    "diloco:steps=4": [0.2501234, 0.2501234],
}


def document(kind: str, about: dict[str, Any], values: dict[str, list[float]]) -> dict[str, Any]:
    """Return what `bench exchange` writes."""
    machine = {"date": "2026-01-31", "processor": "CPU", "cores": 2, "load": 0.25}
    case = {"name": "model", "about": about, "unit": "seconds", "values": values}
    case |= {"base": "average", "again": "average again"} if kind == "exchange" else {}
    result = {"kind": kind, "ranks": 2, "nodes": 2, "peers": [], "skipped": {}, "extra": {}}
    packages = {"torch": "2.1"}
    written = {"base": "", "again": "", **case, "comparisons": [], "efficiencies": {}}
    return {
        "machine": {**machine, "packages": packages, "memory_bytes": 8},
        "results": [{**result, "cases": [written], "figures": []}],
    }


def test_the_page_is_what_the_records_say() -> None:
    script = runpy.run_path(str(DOCS / "exchanges_page.py"))
    text = (DOCS / "exchanges" / "measured.md").read_text()
    records = script["read_records"](DOCS / "exchanges" / "measured")
    assert script["page"](text, records) == text, "run docs/exchanges_page.py --write"


def test_a_page_of_made_records(tmp_path: Path) -> None:
    script = runpy.run_path(str(DOCS / "exchanges_page.py"))
    about = {"steps": dict.fromkeys(TIMES, 4), "sent_bytes": dict.fromkeys(TIMES, 109.2e6)}
    losses = {name: [curve[-1][2] for curve in curves] for name, curves in CURVES.items()}
    script["add"]("1gbit", "steps", document("exchange", about, TIMES), tmp_path)
    trained = document("exchange-loss", {"task": "text-decay", "curves": CURVES}, losses)
    script["add"]("1gbit", "losses", trained, tmp_path)
    text = script["tables"](script["read_records"](tmp_path))
    assert [line for line in text.splitlines() if line.startswith("### ")] == [
        "### Steps of the model, 1 Gbit/s",
        "### Losses of the model, 1 Gbit/s",
        "### Steps by link",
        "### Targets",
    ]
    for row in (
        "| no communication | 250 ms | 0.25 | 1 | 109 MB | 4 |",
        "| `nbit:bits=1` | 450 ms | 0.45 (0.425 to 0.475) | 1.8 (1.7 to 1.9) | 109 MB | 4 |",
        "| `diloco:steps=4` | 2 (1.5 to 2.5) | +0.500 | within the seeds | 2 | 1 |",
        "at 1 Gbit/s: at most 0.35 | 0.45 (0.425 to 0.475) | missed |",
        "| step of `diloco:steps=4` / no communication at 1 Gbit/s: at most 1.02 | 1 | met |",
        "the model: within the seeds of the average | within the seeds (+0.500) | met |",
    ):
        assert text.count(row) == 1, text
