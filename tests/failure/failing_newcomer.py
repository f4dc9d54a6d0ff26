"""A script that raises where it is to join others, and the others, which wait for that."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from newcomers import JOINED
from ranks import report

import hvdtrain.torch as hvd

TRIES = 3


def main(folder: Path) -> None:
    """Have rank 1 be killed, and rank 0 go on until all that are to replace it have failed."""
    if JOINED:
        (folder / str(os.getpid())).touch()
        raise ValueError("as it was told to")
    hvd.init()

    @hvd.elastic.run
    def train(state: Any) -> None:
        while hvd.size() > 1 or len(list(folder.iterdir())) < TRIES:
            if hvd.rank() == 1:
                os.kill(os.getpid(), 9)
            time.sleep(0.01)
            hvd.barrier()

    train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank))
    report(1, hvd.size())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
