"""The backend "hvdtrain" of torch.distributed, on each rank: distributed_worker.py CASES."""

import os
import sys
from functools import partial
from typing import Any

import pytest
import torch
from shared_launch import run_each
from torch import distributed
from torch.distributed import _functional_collectives as functional
from torch.distributed._composable.replicate import replicate
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hvdtrain.torch as hvd
import hvdtrain.torch.process_group  # noqa: F401
from hvdtrain.errors import MismatchError, UnsupportedError

Op = distributed.ReduceOp


def start() -> None:
    """Join the group as a script under `exec` does, at an address that rank 0 chooses."""
    hvd.init()
    store = None
    if hvd.rank() == 0:
        store = distributed.TCPStore("127.0.0.1", 0, hvd.size(), True, wait_for_workers=False)
    port = hvd.broadcast_object(store.port if store else None)
    if store is None:
        store = distributed.TCPStore("127.0.0.1", port, hvd.size(), False)
    distributed.init_process_group("hvdtrain", store=store, rank=hvd.rank(), world_size=hvd.size())
    assert distributed.get_backend() == "hvdtrain"


def every(shape: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return what each rank has: all its elements are its rank plus 2."""
    return [torch.full(shape, rank + 2, dtype=dtype) for rank in range(hvd.size())]


def reductions() -> None:
    stacks = [torch.stack(every([3, 2], dtype)) for dtype in (torch.float32, torch.int64)]
    for stack in stacks:
        wanted = {Op.SUM: stack.sum(0), Op.MIN: stack.amin(0), Op.MAX: stack.amax(0)}
        for op, expected in {**wanted, Op.PRODUCT: stack.prod(0)}.items():
            mine = stack[hvd.rank()].clone()
            work = distributed.all_reduce(mine, op, async_op=True)
            work.wait()
            assert work.is_completed()
            assert torch.equal(mine, expected.to(mine.dtype)), op
    mine = stacks[0][hvd.rank()].clone()
    distributed.all_reduce(mine, Op.AVG)
    assert torch.allclose(mine, stacks[0].mean(0))
    root = hvd.size() - 1
    mine = stacks[0][hvd.rank()].clone()
    distributed.reduce(mine, root)
    assert torch.equal(mine, stacks[0].sum(0) if hvd.rank() == root else stacks[0][hvd.rank()])


def movements() -> None:
    rank, size = hvd.rank(), hvd.size()
    tensors = every([2, 3], torch.float64)
    root = size - 1
    mine = tensors[rank].clone()
    distributed.broadcast(mine, root)
    assert torch.equal(mine, tensors[root])
    listed = [torch.empty(2, 3, dtype=torch.float64) for _ in range(size)]
    distributed.all_gather(listed, tensors[rank])
    assert torch.equal(torch.stack(listed), torch.stack(tensors))
    whole = torch.empty(2 * size, 3, dtype=torch.float64)
    single = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
    single(whole, tensors[rank])
    assert torch.equal(whole, torch.cat(tensors))
    listed = [torch.zeros(2, 3, dtype=torch.float64) for _ in range(size)]
    distributed.gather(tensors[rank], listed if rank == root else None, root)
    assert rank != root or torch.equal(torch.stack(listed), torch.stack(tensors))
    distributed.scatter(mine, tensors if rank == root else None, root)
    assert torch.equal(mine, tensors[rank])
    distributed.reduce_scatter(mine, [tensor * (rank + 1) for tensor in tensors])
    assert torch.equal(mine, tensors[rank] * sum(range(1, size + 1)))
    received = [torch.empty(2, 3, dtype=torch.float64) for _ in range(size)]
    distributed.all_to_all(received, [tensor + 10 * rank for tensor in tensors])
    assert all(torch.equal(r, tensors[rank] + 10 * n) for n, r in enumerate(received))
    distributed.barrier()


def parts() -> None:
    """Rank r sends rank s r + s rows, then two to each; a rank without room for them says so."""
    rank, size = hvd.rank(), hvd.size()
    counts = [rank + other for other in range(size)]
    sent = torch.cat([torch.full([n, 2], 10 * rank + other) for other, n in enumerate(counts)])
    mine = torch.empty_like(sent)
    distributed.all_to_all_single(mine, sent, counts, counts)
    wanted = [torch.full([n, 2], 10 * other + rank) for other, n in enumerate(counts)]
    assert torch.equal(mine, torch.cat(wanted))
    sent = torch.arange(2 * size).add(100 * rank)
    mine = torch.empty_like(sent)
    distributed.all_to_all_single(mine, sent, async_op=True).wait()
    firsts = [100 * other + 2 * rank for other in range(size)]
    assert mine.tolist() == [number for first in firsts for number in (first, first + 1)]
    if size > 1:
        few = [len(mine) - size + 1, *[1] * (size - 1)]
        with pytest.raises(MismatchError, match=rf"ranks sent \[2.*has room for \[{few[0]}, 1"):
            distributed.all_to_all_single(mine, sent, few)


def several() -> None:
    """Several tensors as one operation, as functional collectives call all of theirs."""
    rank, size = hvd.rank(), hvd.size()
    tensors = every([2, 3], torch.float64)
    with _coalescing_manager():
        wholes = [torch.empty(2 * size, 3, dtype=torch.float64) for _ in range(2)]
        for factor, whole in enumerate(wholes, 1):
            distributed.all_gather_into_tensor(whole, tensors[rank] * factor)
    assert all(torch.equal(w, torch.cat(tensors) * n) for n, w in enumerate(wholes, 1))
    with _coalescing_manager():
        mine = [torch.empty(2, 3, dtype=torch.float64) for _ in range(2)]
        for factor, part in enumerate(mine, 1):
            distributed.reduce_scatter_tensor(part, torch.cat(tensors) * factor)
    assert all(torch.equal(part, tensors[rank] * size * n) for n, part in enumerate(mine, 1))
    group = distributed.group.WORLD
    assert group is not None
    found = functional.all_gather_tensor(tensors[rank], 0, group)
    assert torch.equal(found, torch.cat(tensors))
    found = functional.reduce_scatter_tensor(torch.cat(tensors), "sum", 0, group)
    assert torch.equal(found, tensors[rank] * size)
    found = functional.all_to_all_single(torch.cat(tensors), None, None, group)
    assert torch.equal(found, tensors[rank].repeat(size, 1))


def objects() -> None:
    rank, size = hvd.rank(), hvd.size()
    found: list[object] = [None] * size
    distributed.all_gather_object(found, "x" * rank)
    assert found == ["x" * other for other in range(size)]
    sent: list[object] = [("of", rank)]
    distributed.broadcast_object_list(sent, src=size - 1)
    assert sent == [("of", size - 1)]


def refusals() -> None:
    """Errors of hvdtrain reach those who wait, on all ranks."""
    with pytest.raises(MismatchError, match="shape"):
        distributed.all_reduce(torch.zeros(1 + hvd.rank()))
    with pytest.raises(UnsupportedError, match="BAND"):
        distributed.all_reduce(torch.zeros(1, dtype=torch.int64), Op.BAND)
    some, peer = torch.zeros(1), (hvd.rank() + 1) % hvd.size()
    for call in (distributed.send, distributed.isend):
        with pytest.raises(UnsupportedError, match=r"no send\(\): use all_to_all_single\(\)"):
            call(some, peer)
    for source in (peer, None):
        with pytest.raises(UnsupportedError, match=r"no recv\(\): .*backend='gloo'"):
            distributed.recv(some, source)
    with pytest.raises(UnsupportedError, match=r"no all_gather_coalesced\(\): call all_gather"):
        distributed.all_gather_coalesced([[some] * hvd.size()], [some])
    mesh = distributed.init_device_mesh("cpu", (hvd.size(),))
    whole = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    twice = pytest.raises(UnsupportedError, match="is reduced or divided over ranks by torch's")
    whole_or_part: list[Any] = [DistributedDataParallel, whole, partial(fully_shard, mesh=mesh)]
    for wrap in whole_or_part:
        model = wrap(torch.nn.Linear(1, 1))
        with twice:
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()))
    alike: list[Any] = [replicate, DistributedDataParallel]
    for wrap in alike:
        plain = torch.nn.Linear(1, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([plain.bias]))
        with twice:
            wrap(plain)(some)
        del optimizer
    wrap(plain)(some)
    settings: dict[str, Any]
    for wrap in whole_or_part[1:]:  # after which the optimizer has parameters of no model
        for settings in ({}, {"exchange": "local:steps=2"}, {"sharded": True}):
            plain = torch.nn.Linear(1, 1)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(plain.parameters()), **settings)
            wrap(plain)(some).sum().backward()
            with twice:
                optimizer.step()
    pair = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    pair[0].requires_grad_(False)  # which DDP leaves out, whatever becomes of it
    model = DistributedDataParallel(pair)
    pair.requires_grad_(True)
    hvd.DistributedOptimizer(torch.optim.SGD(pair[0].parameters()))
    pair[1].requires_grad_(False)
    with twice:
        hvd.DistributedOptimizer(torch.optim.SGD([*pair[1].requires_grad_(True).parameters()]))


def data_parallel() -> list[float]:
    """DDP does what one process does with the whole batch; buffers are those of rank 0."""
    inputs = torch.randn(24, 8, generator=torch.Generator().manual_seed(1)).double()
    torch.manual_seed(hvd.rank())
    layers = [torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers).double(), bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        part = inputs[step * 6 : step * 6 + 6][hvd.rank() :: hvd.size()]
        optimizer.zero_grad()
        model(part).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def buckets_that_differ() -> None:
    """In whose backward pass ranks reduce different tensors, which ends the job."""
    layers = [torch.nn.Linear(512, 512) for _ in range(3)]  # 1 MiB each
    # Without unused parameters to look for, the first step has one bucket of all gradients.
    model = DistributedDataParallel(
        torch.nn.Sequential(*layers),
        bucket_cap_mb=0.5 if hvd.rank() == 0 else 25.0,
        find_unused_parameters=True,
    )
    model(torch.ones(4, 512)).sum().backward()
    print("after the backward pass", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    start()
    run_each(globals(), sys.argv[1:])
    distributed.destroy_process_group()
