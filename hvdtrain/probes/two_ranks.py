"""One rank of the trial of `hvdtrain check`: all ranks meet and add with the configured engine."""

from __future__ import annotations

import json
import os
import sys

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.config import Config
from hvdtrain.engines.registry import choose_engine, open_world
from hvdtrain.errors import HvdtrainError
from hvdtrain.types import ReduceOp

_COUNT = 1000


@collective
def main() -> None:
    """All-reduce rank + 1; rank 0 prints the sums and where the ranks are."""
    try:
        config = Config.from_environ(os.environ)
        world = open_world(choose_engine(config.engine, os.environ), config, os.environ)
    except HvdtrainError as error:
        sys.exit(f"hvdtrain: {error}")
    ranks = world.communicator
    array = np.full(_COUNT, ranks.rank + 1.0)
    ranks.allreduce(Buffer.from_array(array), ReduceOp.SUM)
    cores = np.empty(ranks.size, np.int64)
    own = np.array([len(os.sched_getaffinity(0))])
    ranks.allgather(Buffer.from_array(own), Buffer.from_array(cores), [1] * ranks.size)
    if ranks.rank == 0:
        result = {
            "engine": world.engine,
            "library": world.library,
            "size": ranks.size,
            "cores": cores.tolist(),
            "nodes": len(set(world.nodes)),
            "hosts": len(set(world.hostnames)),
            "sums": sorted(set(array.tolist())),
        }
        print(json.dumps(result), flush=True)
    ranks.close()


if __name__ == "__main__":
    main()
