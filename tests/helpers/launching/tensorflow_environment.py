"""The environment with TensorFlow, which `make test` makes."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

__all__ = ["tensorflow_python"]


def tensorflow_python() -> Path:
    """Return the interpreter whose environment holds TensorFlow; skip the test without one."""
    named = os.environ.get("HVDTRAIN_TENSORFLOW_PYTHON")
    if not named:
        if importlib.util.find_spec("tensorflow") is not None:
            return Path(sys.executable)
        pytest.skip(
            "HVDTRAIN_TENSORFLOW_PYTHON names no environment with TensorFlow, as 'make test' "
            "makes it"
        )
    python = Path(named)
    if not python.exists():
        raise AssertionError(f"no {python}, which HVDTRAIN_TENSORFLOW_PYTHON names")
    return python
