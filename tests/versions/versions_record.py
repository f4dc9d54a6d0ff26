"""What `make test-versions` leaves for docs/versions.md: what ran, and with which versions."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from bounds import lowest
from paths import ROOT

_VERSIONS = """
import json, sys
from importlib.metadata import distributions
found = {one.name.lower().replace("_", "-"): one.version for one in distributions()}
versions = {name: found[name].partition("+")[0] for name in sys.argv[1:] if name in found}
print(json.dumps(versions))
"""


class VersionsRecord:
    def __init__(self) -> None:
        self._packages: dict[str, dict[str, str]] = {}
        self._runs: dict[str, dict[str, str]] = {}

    def note_packages(self, end: str, python: Path) -> None:
        if end not in self._packages:
            names = sorted(lowest((ROOT / "setup.py").read_text()))
            command = [str(python), "-c", _VERSIONS, *names]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            self._packages[end] = json.loads(done.stdout)

    @contextmanager
    def run(self, end: str, title: str) -> Iterator[None]:
        outcomes = self._runs.setdefault(title, {})
        outcomes[end] = "failed"
        yield
        outcomes[end] = "passed"

    def write(self, path: Path) -> None:
        document = {
            "date": datetime.now(UTC).date().isoformat(),
            "python": platform.python_version(),
            "packages": self._packages,
            "runs": self._runs,
        }
        path.write_text(json.dumps(document, indent=1) + "\n")
