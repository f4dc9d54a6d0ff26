"""The environment with Spark and Ray, which `make test-all` makes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

__all__ = ["cluster_python"]


def cluster_python() -> Path:
    """Return the interpreter whose environment holds Spark and Ray; skip the test without one."""
    named = os.environ.get("HVDTRAIN_CLUSTERS_PYTHON")
    if not named:
        pytest.skip("HVDTRAIN_CLUSTERS_PYTHON names no environment with Spark and Ray")
    python = Path(named)
    if not python.exists():
        raise AssertionError(f"no {python}, which HVDTRAIN_CLUSTERS_PYTHON names")
    return python
