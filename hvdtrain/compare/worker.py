"""One process of a contender: python -m hvdtrain.compare.worker TASK."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.compare.protocol.rank_file import result_file, write_error
from hvdtrain.compare.protocol.strategy import Launch
from hvdtrain.compare.protocol.task import Place, Task
from hvdtrain.compare.strategies.table import find_strategy
from hvdtrain.world import promised_world

__all__ = ["main"]


def main(file: str) -> None:
    """Train, and write what was measured, or the error.

    Args:
        file: file with the task.
    """
    task = Task.read(Path(file))
    strategy = find_strategy(task.strategy)
    place = _place(strategy.launch, os.environ)
    folder = Path(task.folder)
    try:
        for need in strategy.needs:
            need.require()
        strategy.train(task, place).write(result_file(folder, place.rank))
    except Exception as error:
        write_error(folder, place.rank, error)
        raise


def _place(launch: Launch, environ: Mapping[str, str]) -> Place:
    if launch is not Launch.MPI:
        return Place(int(environ["RANK"]), int(environ["WORLD_SIZE"]))
    promised = promised_world(environ)
    return Place(0, 1) if promised is None else Place(promised.rank, promised.size)


if __name__ == "__main__":
    main(*sys.argv[1:])
