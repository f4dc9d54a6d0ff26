"""A script in the shape of Horovod's elastic examples, whose ranks kill themselves."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from ranks import report

import hvdtrain.torch as hvd

SAMPLES, EPOCHS, BATCH = 24, 3, 2
NAME = "/dev/shm/sm_segment"  # of Open MPI


def main(victims: list[int], killed_in_reset: int) -> None:
    """Train; victims are killed in a step, and another one when the others have noticed that."""
    hvd.init()
    started = hvd.rank()
    torch.manual_seed(started)
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    data = torch.arange(3.0 * SAMPLES).reshape(SAMPLES, 3) / SAMPLES
    sampler = hvd.elastic.ElasticSampler(range(SAMPLES), shuffle=True)
    resets, used = [], []

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.epoch < EPOCHS:
            own = list(state.sampler)
            for batch, first in enumerate(range(0, len(own), BATCH)):
                chosen = own[first : first + BATCH]
                used.append((state.epoch, state.steps, chosen))
                optimizer.zero_grad()
                model(data[chosen]).square().mean().backward()
                if started in victims and (state.epoch, batch) == (1, victims.index(started)):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                state.sampler.record_batch(batch, BATCH)
                state.steps += 1
                state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    def on_reset() -> None:
        resets.append(hvd.size())
        if started == killed_in_reset:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.barrier()

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, steps=0)
    state.register_reset_callbacks([on_reset])
    train(state)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    everywhere = hvd.allgather(weights[None])
    assert (everywhere == weights).all()
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if NAME in line]
    assert all(line.endswith("(deleted)") for line in maps)
    report(1, {"resets": resets, "used": used, "size": hvd.size(), "rank": hvd.rank()})


if __name__ == "__main__":
    main([int(word) for word in sys.argv[2:]], int(sys.argv[1]))
