"""Runs examples without TensorFlow one after the other: torch_examples_worker.py PROGRAM..."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from ranks import report

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(program: str) -> dict[str, Any]:
    """Run a program; return its accuracy, and its weights if it holds a model."""
    sys.argv = [program]
    names = runpy.run_path(str(EXAMPLES / program), run_name="__main__")
    model = names.get("model")
    parameters = [] if model is None else list(model.parameters())
    weights = [number for each in parameters for number in each.detach().flatten().tolist()]
    return {"accuracy": names["accuracy"], "weights": weights}


report(len(sys.argv) - 1, {program: run(program) for program in sys.argv[1:]})
