"""Ranks of which the last is killed in the middle of shutdown(), when all have left."""

from __future__ import annotations

import os
import signal
import sys

import torch
from ranks import report

import hvdtrain.torch as hvd
from hvdtrain.core import context


def main() -> None:
    hvd.init()
    rank, last = hvd.rank(), hvd.size() - 1
    hvd.allreduce(torch.ones(3))
    if rank == last:
        part = getattr(context.current(), sys.argv[1])  # that shutdown() stops after all have left
        part.stop = lambda: os.kill(os.getpid(), signal.SIGKILL)
    hvd.shutdown()
    report(1, list(range(last)))


if __name__ == "__main__":
    main()
