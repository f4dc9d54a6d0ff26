"""The job as a script with `hvd.elastic`: script.py LIBRARY FOLDER, for hvdtrain or Horovod."""

from __future__ import annotations

import importlib
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from hvdtrain_bench.elastic.notes import BATCH, SAMPLES, Notes
from hvdtrain_bench.elastic.work import build_model, make_optimizer, make_samples


def main(library: str, folder: str) -> None:
    hvd: Any = importlib.import_module(library)
    hvd.init()
    torch.set_num_threads(1)
    notes = Notes(Path(folder))
    model = build_model()
    optimizer = hvd.DistributedOptimizer(make_optimizer(model), model.named_parameters())
    inputs, targets = make_samples()
    sampler = hvd.elastic.ElasticSampler(range(SAMPLES), shuffle=False)

    def train(state: Any) -> None:
        notes.world(len(resets), state.done)
        own = list(state.sampler)
        for number, first in enumerate(range(0, len(own), BATCH)):
            chosen = own[first : first + BATCH]
            notes.begin(chosen)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
            optimizer.step()
            notes.end()
            state.sampler.record_batch(number, BATCH)
            state.done += BATCH * hvd.size()
            state.commit()

    resets: list[None] = []  # the worlds that this process has left
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, done=0)
    state.register_reset_callbacks([lambda: resets.append(None)])
    with _stages(library, notes):
        hvd.elastic.run(train)(state)
    hvd.shutdown()


def _stages(library: str, notes: Notes) -> AbstractContextManager[None]:
    if library != "hvdtrain.torch":
        return nullcontext()
    from hvdtrain_bench.elastic.worlds import noted_stages

    return noted_stages(notes)


if __name__ == "__main__":
    main(*sys.argv[1:])
