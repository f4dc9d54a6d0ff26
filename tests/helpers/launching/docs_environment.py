"""The environment with MkDocs, which `make docs` makes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from environments import named_python

_ROOT = Path(__file__).resolve().parents[3]


def docs_python() -> Path:
    return named_python("HVDTRAIN_DOCS_PYTHON", "mkdocs-material")


def build_site(folder: Path) -> None:
    done = subprocess.run(
        [docs_python(), "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=_ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
