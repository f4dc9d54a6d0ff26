"""All-reduce of float32 against plain mpi4py, interleaved in one run.

    mpirun --bind-to none -np 2 python benchmarks/collectives.py

Peers take turns within each repeat, so that whatever slows the machine slows all of them. Every
timed result is checked.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from mpi4py import MPI

import hvdtrain.torch as hvd
from hvdtrain.buffer import Buffer
from hvdtrain.core import context
from hvdtrain.types import ReduceOp

SIZES_BYTES = (1 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
REPEATS = 7
SECONDS_PER_REPEAT = 0.05


@dataclass
class Peer:
    """Something that all-reduces `tensor` in place or returns the sum."""

    name: str
    reduce: Callable[[torch.Tensor], torch.Tensor]


def peers() -> list[Peer]:
    """Return what is compared; the first is what the others are divided by."""
    communicator = context.current().world.communicator

    def plain(tensor: torch.Tensor) -> torch.Tensor:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy())
        return tensor

    def engine(tensor: torch.Tensor) -> torch.Tensor:
        communicator.allreduce(Buffer.from_array(tensor.numpy()), ReduceOp.SUM)
        return tensor

    def operation(tensor: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(tensor, name="benchmark", op=hvd.Sum)

    return [
        Peer("mpi4py Allreduce", plain),
        Peer("engine mpi", engine),
        Peer("hvd.allreduce", operation),
    ]


def seconds_per_call(peer: Peer, count: int, calls: int) -> float:
    """Time a peer, and check the sum."""
    tensors = [torch.full((count,), float(hvd.rank() + 1)) for _ in range(2)]
    result = peer.reduce(tensors[0])
    expected = hvd.size() * (hvd.size() + 1) / 2
    assert float(result[0]) == float(result[-1]) == expected, peer.name
    tensors[1].zero_()
    hvd.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        peer.reduce(tensors[1])
    return (time.perf_counter() - started) / calls


def measure(count: int) -> dict[str, np.ndarray]:
    """Return the times of each peer, [repeats]."""
    times: dict[str, list[float]] = {peer.name: [] for peer in peers()}
    pilot = max(seconds_per_call(peer, count, 3) for peer in peers())
    calls = hvd.broadcast_object(max(3, int(SECONDS_PER_REPEAT / pilot)))
    for _ in range(REPEATS):
        for peer in peers():
            times[peer.name].append(seconds_per_call(peer, count, calls))
    return {name: np.array(values) for name, values in times.items()}


def main() -> None:
    """Print a table on rank 0."""
    hvd.init(engine="mpi")
    torch.set_num_threads(1)
    if hvd.rank() == 0:
        world = context.current()
        print(
            f"{hvd.size()} ranks, {world.library}, torch {torch.__version__}, {platform.machine()}"
        )
        print("| bytes | peer | median us | ratio to the first | spread of the ratio |")
        print("|---|---|---|---|---|")
    for nbytes in SIZES_BYTES:
        times = measure(nbytes // 4)
        base = next(iter(times.values()))
        for name, values in times.items():
            ratio = values / base
            if hvd.rank() == 0:
                print(
                    f"| {nbytes} | {name} | {np.median(values) * 1e6:.1f} | {np.median(ratio):.2f} "
                    f"| {ratio.min():.2f} to {ratio.max():.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
