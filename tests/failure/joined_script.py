"""A script in the shape of Horovod's elastic examples, whose ranks are killed, and join others."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from newcomers import JOINED, await_newcomer
from ranks import report

from hvdtrain.buffer import Buffer

SAMPLES, EPOCHS, BATCH, RATE = 48, 3, 2, 0.01
SEGMENT = "/dev/shm/sm_segment"  # of Open MPI


def be_slow_once() -> None:
    """Have the next broadcast wait before it, for longer than it takes to notice a lost rank."""
    from hvdtrain.engines.mpi.communicator import MpiCommunicator  # which starts MPI

    broadcast = MpiCommunicator.broadcast

    def late(self: MpiCommunicator, buffer: Buffer, root_rank: int) -> None:
        MpiCommunicator.broadcast = broadcast  # type: ignore[method-assign]
        time.sleep(0.5)
        broadcast(self, buffer, root_rank)

    MpiCommunicator.broadcast = late  # type: ignore[method-assign]


def main(wanted: int, slow: int, killed_in_reset: int, *victims: int) -> None:
    """Train; rank 0 waits in the second epoch for others, up to `wanted`; victims are killed."""
    hvd.init()
    started = -1 if JOINED else hvd.rank()
    torch.manual_seed(started + 1)
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=RATE * hvd.size(), momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    data = torch.arange(3.0 * SAMPLES).reshape(SAMPLES, 3) / SAMPLES
    sampler = hvd.elastic.ElasticSampler(range(SAMPLES), shuffle=True)
    sizes, used = [], []

    @hvd.elastic.run
    def train(state: Any) -> None:
        sizes.append(hvd.size())
        while state.epoch < EPOCHS:
            own = list(state.sampler)
            for batch, first in enumerate(range(0, len(own), BATCH)):
                chosen = own[first : first + BATCH]
                used.append((state.epoch, chosen))
                optimizer.zero_grad()
                model(data[chosen]).square().mean().backward()
                if started in victims and (state.epoch, batch) == (0, 2 + victims.index(started)):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                state.sampler.record_batch(batch, BATCH)
                state.steps += 1
                if started == slow and state.epoch == 1 and hvd.size() < wanted:
                    be_slow_once()
                await_newcomer(wanted if state.epoch == 1 else 0)
                state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    state: Any = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, steps=0)

    def on_reset() -> None:
        if started == killed_in_reset:
            os.kill(os.getpid(), signal.SIGKILL)
        for group in optimizer.param_groups:
            group["lr"] = RATE * hvd.size()
        if killed_in_reset >= 0:
            hvd.barrier()

    state.register_reset_callbacks([on_reset])
    train(state)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (hvd.allgather(weights[None]) == weights).all()
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if SEGMENT in line]
    assert all(line.endswith("(deleted)") for line in maps)
    mine = {"joined": JOINED, "sizes": sizes, "used": used, "steps": state.steps}
    everyone = hvd.allgather_object(mine)
    assert optimizer.param_groups[0]["lr"] == RATE * hvd.size()
    if not JOINED:  # its number among those of its own start is another rank's
        report(1, everyone)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
