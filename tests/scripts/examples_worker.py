"""Runs examples one after the other: examples_worker.py PROGRAM..."""

import runpy
import sys
from pathlib import Path
from typing import Any

from ranks import report

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Calls:
    """Counts how often Python runs through a model of Keras: once for each trace, or each batch."""

    count = 0

    def __init__(self) -> None:
        import keras

        plain = keras.layers.Layer.__call__

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            self.count += isinstance(layer, keras.Model)
            return plain(layer, *args, **kwargs)

        keras.layers.Layer.__call__ = call


def run(program: str, calls: Calls | None) -> dict[str, Any]:
    sys.argv = [program]
    before = 0 if calls is None else calls.count
    names = runpy.run_path(str(EXAMPLES / program), run_name="__main__")
    model: Any = names.get("model")
    if hasattr(model, "get_weights"):
        arrays = model.get_weights()
    else:
        arrays = [] if model is None else [p.detach().cpu().numpy() for p in model.parameters()]
    weights = [float(number) for array in arrays for number in array.ravel()]
    counted = 0 if calls is None else calls.count - before
    return {"accuracy": float(names["accuracy"]), "calls": counted, "weights": weights}


counted = Calls() if any("keras" in program for program in sys.argv) else None
results = {program: run(program, counted) for program in sys.argv[1:]}
report(len(results), results)
