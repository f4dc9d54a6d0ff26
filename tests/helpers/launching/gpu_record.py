"""What a run of the tests on a GPU leaves for people to read: docs/gpu-record.json."""

import json
import platform
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

_DRIVER = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]


class GpuRecord:
    """A plugin of pytest that writes how each test ended, and on what; nothing about the host."""

    def __init__(self, path: Path, versions: dict[str, str]) -> None:
        self._path, self._versions = path.absolute(), versions
        self._started = time.monotonic()
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = self._tests.setdefault(report.nodeid, {"outcome": "unfinished", "seconds": 0.0})
        found["seconds"] = round(found["seconds"] + report.duration, 1)
        if report.outcome != "passed" or report.when == "call":
            found["outcome"] = report.outcome
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            found["reason"] = report.longrepr[2].removeprefix("Skipped: ")
        found |= dict(report.user_properties)

    def pytest_sessionfinish(self) -> None:
        outcomes = [test["outcome"] for test in self._tests.values()]
        document = {
            "date": datetime.now(UTC).date().isoformat(),
            **_hardware(),
            "python": platform.python_version(),
            **self._versions,
            "seconds": round(time.monotonic() - self._started),
            **{
                kind: outcomes.count(kind) for kind in ("passed", "failed", "skipped", "unfinished")
            },
            "tests": dict(sorted(self._tests.items())),
        }
        self._path.write_text(json.dumps(document, indent=1) + "\n")


def _hardware() -> dict[str, object]:
    import torch

    count = torch.cuda.device_count()
    nccl: Any = torch.cuda.nccl
    return {
        "gpu": torch.cuda.get_device_name() if count else None,
        "gpus": count,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl.version())) if count else None,
    }


def _driver() -> str | None:
    try:
        done = subprocess.run(_DRIVER, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n", 1)[0].strip()
