"""One process of a contender: python -m hvdtrain_bench.compare.worker TASK."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from hvdtrain.world import promised_world
from hvdtrain_bench.compare.meters import (
    ProcessPlace,
    read_task,
    result_file,
    write_error,
    write_result,
)
from hvdtrain_bench.compare.strategies import Launch, find_strategy


def main(file: str) -> None:
    task = read_task(Path(file))
    options = task.options
    strategy = find_strategy(options.framework, task.strategy)
    place = _place(strategy.launch, os.environ)
    if options.framework == "keras":
        _prepare_keras(strategy.backend or options.backend, options.dtype, place)
    try:
        for need in strategy.needs:
            need.require()
        ways = import_module(f"hvdtrain_bench.compare.{options.framework}_training")
        write_result(result_file(task.folder, place.rank), ways.train(task, place))
    except Exception as error:
        write_error(task.folder, place.rank, error)
        raise


def _prepare_keras(backend: str | None, dtype: str, place: ProcessPlace) -> None:
    """Set what Keras, TensorFlow and JAX read when they are imported."""
    if dtype == "float64":
        os.environ["JAX_ENABLE_X64"] = "1"
    os.environ["KERAS_BACKEND"] = backend or os.environ.get("KERAS_BACKEND", "tensorflow")
    share = max(1, len(os.sched_getaffinity(0)) // place.size)
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", str(share))


def _place(launch: Launch, environ: Mapping[str, str]) -> ProcessPlace:
    if launch is not Launch.MPI:
        return ProcessPlace(int(environ["RANK"]), int(environ["WORLD_SIZE"]))
    promised = promised_world(environ)
    return ProcessPlace(0, 1) if promised is None else ProcessPlace(promised.rank, promised.size)


if __name__ == "__main__":
    main(*sys.argv[1:])
