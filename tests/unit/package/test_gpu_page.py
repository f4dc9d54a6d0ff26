"""docs/gpu.md says what the record of the last run on a GPU says."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parents[3] / "docs"
RECORD = {
    "date": "2026-01-31",
    "gpu": "NVIDIA H100",
    "gpus": 1,
    "driver": "580.1",
    "cuda": "13.0",
    "nccl": "2.28.9",
    "python": "3.12.3",
    "hvdtrain": "0.1.0",
    "torch": "2.11.0",
    "mpi4py": "4.1.2",
    "numpy": "2.4.6",
    "mpi": "Open MPI v5.0.11",
    "seconds": 90,
    "passed": 1,
    "failed": 1,
    "skipped": 1,
    "unfinished": 0,
    "tests": {
        "tests/a/test_b.py::test_nccl[operations of the cpu-2]": {
            "outcome": "passed",
            "seconds": 7.5,
            "cases": 12,
        },
        "tests/a/test_b.py::test_one_process": {"outcome": "failed", "seconds": 3.0},
        "tests/a/test_b.py::test_two": {"outcome": "skipped", "seconds": 0.0, "reason": "no GPU"},
    },
}
ROWS = """\
| nccl | operations of the cpu-2 | passed | 7.5 seconds, 12 cases |
| one process |  | failed | 3.0 seconds |
| two |  | skipped: no GPU | 0.0 seconds |
"""


def test_the_page_is_what_the_record_says() -> None:
    script = runpy.run_path(str(DOCS / "gpu_page.py"))
    text = (DOCS / "gpu.md").read_text()
    record = script["read_record"](DOCS / "gpu-record.json")
    assert script["page"](text, record) == text, "run docs/gpu_page.py --write"
    changed = script["page"](text, RECORD)
    assert changed.count("On 2026-01-31, on one NVIDIA H100: driver 580.1") == 1
    assert "1 tests passed, 1 failed, 1 were skipped and 0 not finished, in 90 s." in changed
    assert changed.count(ROWS) == 1
    assert script["page"](changed, record) == text
