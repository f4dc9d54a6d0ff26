"""Environments that tests use beside their own, as `make test-all` makes them."""

import os
from pathlib import Path

import pytest


def named_python(variable: str, packages: str) -> Path:
    named = os.environ.get(variable)
    if not named:
        pytest.skip(f"{variable} names no environment with {packages}, as 'make test-all' makes it")
    python = Path(named)
    if not python.exists():
        raise AssertionError(f"no {python}, which {variable} names")
    return python
