"""Ranks that compute sums while signals interrupt them, and one is slow, until a file is there."""

import random
import signal
import sys
import time
from pathlib import Path

import torch
from ranks import report

import hvdtrain.torch as hvd

ALARM_SECONDS = 0.003
# The least number of interruptions in operations, of each rank.
INTERRUPTIONS = 50
SLOWEST_SECONDS = 0.02


class Alarms:
    def __init__(self) -> None:
        self.computing, self.rung = False, 0
        signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, ALARM_SECONDS, ALARM_SECONDS)

    def _ring(self, *_: object) -> None:
        self.rung += self.computing

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


def expect(got: torch.Tensor, value: float) -> None:
    assert torch.equal(got, torch.full_like(got, value)), (got, value)


def compute(number: int) -> None:
    rank, size = hvd.rank(), hvd.size()
    ranks = size * (size - 1) // 2
    handles = [
        hvd.allreduce_async(torch.full((n,), rank + number), name=f"sum {n}", op=hvd.Sum)
        for n in (3, 70_000)
    ]
    large = torch.full((300_000,), float(rank * number))
    expect(hvd.allreduce(large, name="large", op=hvd.Sum), ranks * number)
    for handle in handles:
        expect(hvd.synchronize(handle), ranks + size * number)
    root = number % size
    expect(hvd.broadcast(torch.full((9,), rank * 10 + number), root), root * 10 + number)
    gathered = hvd.allgather(torch.full((rank + 1, 2), rank + number))
    assert gathered[:, 0].tolist() == [r + number for r in range(size) for _ in range(r + 1)]
    received = hvd.alltoall(torch.arange(size) + 100 * rank + number)
    assert received.tolist() == [100 * r + rank + number for r in range(size)]


def step(weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    (weight * hvd.rank()).sum().backward()
    before = weight.detach().clone()
    optimizer.step()
    expect(before - weight.detach(), (hvd.size() - 1) / 2)


def main(end: Path) -> None:
    hvd.init()
    rng = random.Random(hvd.rank())
    weight = torch.nn.Parameter(torch.zeros(40_000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    alarms, number, going = Alarms(), 0, True
    while going:
        number += 1
        if hvd.rank() == 1:
            time.sleep(rng.uniform(0, SLOWEST_SECONDS))
        alarms.computing = True
        compute(number)
        step(weight, optimizer)
        alarms.computing = False
        if hvd.rank() == 0:
            print(f"round {number}", flush=True)
        goes_on = alarms.rung < INTERRUPTIONS or (hvd.rank() == 0 and not end.exists())
        going = bool(hvd.allreduce(torch.tensor([int(goes_on)]), op=hvd.Max, name="going"))
    alarms.stop()
    report(cases=number, payload=[number, alarms.rung])


main(Path(sys.argv[1]))
