"""The environment with Spark and Ray, which `make test-all` makes."""

from __future__ import annotations

from pathlib import Path

from environments import named_python


def cluster_python() -> Path:
    return named_python("HVDTRAIN_CLUSTERS_PYTHON", "Spark and Ray")
