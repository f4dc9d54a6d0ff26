"""What the nccl engine promises beyond the contract. Argument: the name of a case."""

import os
import sys

import numpy as np
import torch
from gpu_ranks import take_device
from job import rank_of
from ranks import report

from hvdtrain.buffer import Buffer
from hvdtrain.config import Config
from hvdtrain.engines import open_world
from hvdtrain.engines.communicator import Communicator
from hvdtrain.errors import UnsupportedError
from hvdtrain.types import ReduceOp

_SLEEP_CYCLES = 4_000_000_000  # of a GPU: one or two seconds


def join() -> Communicator:
    return open_world("nccl", Config.from_environ(os.environ), os.environ).communicator


def reduced(communicator: Communicator, values: torch.Tensor, *factors: float) -> list[float]:
    tensor = values.cuda()
    communicator.allreduce(Buffer.of(tensor), ReduceOp.SUM, *factors)
    result: list[float] = tensor.tolist()
    return result


def the_host_goes_on() -> object:
    """Operations are over when the current stream is, for which the host does not wait."""
    c = join()
    own, gathered = torch.ones(4, device="cuda"), torch.empty(4 * c.size, device="cuda")
    part, counts = torch.empty(4, device="cuda"), [4] * c.size

    def enqueue() -> None:
        c.allreduce(Buffer.of(own), ReduceOp.SUM, 1.0, 0.5)
        c.broadcast(Buffer.of(own), c.size - 1)
        c.allgather(Buffer.of(own), Buffer.of(gathered), counts)
        c.reduce_scatter(Buffer.of(gathered), Buffer.of(part), counts, ReduceOp.SUM)

    enqueue()  # NCCL connects for each kind of operation when it first meets it
    own.fill_(c.rank)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_SLEEP_CYCLES)
        enqueue()
        waited = stream.query()
        part *= 2
    stream.synchronize()
    assert part.tolist() == [c.size**2 * (c.size - 1) / 2] * 4, part
    assert not waited, "the host waited for the GPU"
    return None


def halves() -> object:
    """Halves are multiplied in float32 and do not overflow on the way to their average."""
    if rank_of(os.environ) != 0:  # one rank's word is enough
        os.environ.pop("HVDTRAIN_HALVES_IN_FLOAT32", None)
    c = join()
    large = torch.full((3,), 60000.0, dtype=torch.float16)
    assert reduced(c, large, 1.0, 1 / c.size) == [60000.0] * 3
    # 256 + 1 + ... + 1: bfloat16 has no 257, so a sum that is rounded on the way stays at 256.
    return reduced(c, torch.full((5,), 256.0 if c.rank == 0 else 1.0, dtype=torch.bfloat16))[0]


def one_gpu() -> object:
    """Ranks that have one GPU, and do not say that they want to, are told so, all of them."""
    del os.environ["NCCL_HOSTID"]
    c = join()
    whole = np.array([c.rank])
    c.allreduce(Buffer.of(whole), ReduceOp.SUM)  # memory of the host has no use for a GPU
    try:
        c.empty(4, "cuda:0")
    except UnsupportedError as error:
        return [int(whole[0]), str(error)]
    raise AssertionError("no error")


CASES = (the_host_goes_on, halves, one_gpu)

if __name__ == "__main__":
    take_device("cuda")
    case = next(case for case in CASES if case.__name__ == sys.argv[1])
    report(cases=1, payload=case())
