"""One rank of a job that takes turns with others: steps_rank.py ADDRESS MODEL STEPS THREADS."""

from __future__ import annotations

import sys
import time
from multiprocessing.connection import Client
from statistics import median

import torch

import hvdtrain
import hvdtrain.torch as hvd
from hvdtrain_bench.cases.models import MODELS, Trainer, first_weights
from hvdtrain_bench.cases.steps import with_hvdtrain


def main(address: str, key: str, steps: str, threads: str) -> None:
    hvd.init(engine="mpi")
    torch.set_num_threads(int(threads))

    from hvdtrain_bench.harness.ranks import Ranks
    from hvdtrain_bench.harness.turns import facts

    ranks, model = Ranks(), MODELS[key]
    batch = model.make_batch(model.batch, seed=ranks.rank)
    trainer = Trainer(model, first_weights(model), batch, with_hvdtrain, seed=ranks.rank)
    trainer.restart()
    trainer.step()
    about = facts(ranks, "", f"hvdtrain {hvdtrain.__version__}")
    with Client(address, "AF_UNIX") as parent:
        parent.send(ranks.rank)
        if ranks.rank == 0:
            parent.send((model.title, about))
        while parent.recv():
            trainer.restart()
            ranks.rest()
            ranks.meet()
            trainer.step()
            times = []
            for _ in range(int(steps)):
                began = time.perf_counter()
                trainer.step()
                times.append(time.perf_counter() - began)
            parent.send((median(times), trainer.moved()))
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
