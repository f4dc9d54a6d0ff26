"""Exchanges against implementations of the same methods in torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from nodes import nodes_of_their_own
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_exchange_cases import backward, dense, gradients, parameters, share, wrapped
from torch_training import Model, batch, case, difference, momentum

import hvdtrain.torch as hvd
from hvdtrain.core import context
from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.core.objects import allgather_object, broadcast_object

RANK = 2


@contextmanager
def gloo() -> Iterator[None]:
    """Let torch.distributed connect the ranks."""
    folder = broadcast_object(mkdtemp() if hvd.rank() == 0 else "", 0)
    place = f"file://{folder}/ranks"
    distributed.init_process_group("gloo", place, rank=hvd.rank(), world_size=hvd.size())
    yield
    distributed.destroy_process_group()
    hvd.barrier()  # what connects the ranks looks into the folder even at its end
    rmtree(folder, ignore_errors=True)


def averages_are_those_of_torchs_own_optimizer() -> None:
    """Its first average comes after step warmup_steps, counted from 0."""
    model, other = dense(), dense()
    optimizer = wrapped(model, make_exchange("local:steps=2"))
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    peer = PostLocalSGDOptimizer(momentum(parameters(other)), averager)
    for step in range(5):
        for each, its_model in ((optimizer, model), (peer, other)):
            backward(its_model, step, hvd.rank())
            each.step()
        assert difference(model, other) < 1e-12, step


def first_factors(state: PowerSGDState) -> None:
    """Let torch's PowerSGD begin with the Q of ours; its bucket begins with the last parameter."""
    shapes = {2: (4, 20), 0: (20, 32)}
    drawn = [
        np.random.default_rng([index, 0]).standard_normal((RANK, columns)).T.ravel()
        for index, (_, columns) in shapes.items()
    ]
    state.q_memory_dict[0] = torch.from_numpy(np.concatenate(drawn))
    rows = sum(rows for rows, _ in shapes.values())
    state.p_memory_dict[0] = torch.empty(rows * RANK, dtype=torch.float64)


def power_sgd_is_that_of_torchs_hook() -> None:
    """Twelve steps, two of them averages; the residuals of ranks differ, their sums do not."""
    model, other = dense(), dense()
    exchange = make_exchange(f"powersgd:rank={RANK},min_rate=1.5,warmup=2")
    exchange.hierarchical = False
    optimizer, peer = wrapped(model, exchange), momentum(parameters(other))
    parallel = DistributedDataParallel(other)
    state = PowerSGDState(None, RANK, start_powerSGD_iter=2, min_compression_rate=1.5)
    first_factors(state)
    parallel.register_comm_hook(state, powerSGD_hook)
    for step in range(12):
        backward(model, step, hvd.rank())
        optimizer.step()
        inputs, labels = (share(tensor, hvd.rank()) for tensor in batch(step))
        other.zero_grad()
        F.cross_entropy(parallel(inputs), labels).backward()
        peer.step()
        assert difference(model, other) < 1e-10, step
    kept = exchange.state().own
    ours = np.concatenate([kept[f"residual.{name}"].ravel() for name in ("1.weight", "3.weight")])
    (whole,) = state.error_dict.values()
    theirs = matrices_of(whole.numpy(), other)
    own = allgather_object((ours, theirs), "residuals")
    one, peers = (np.sum([pair[which] for pair in own], axis=0) for which in (0, 1))
    np.testing.assert_allclose(one, peers, rtol=0, atol=1e-9)
    assert np.abs(ours - theirs).max() > 1e-3


def matrices_of(whole: Any, model: Model) -> Any:
    """Return the matrices' part of a bucket, which begins with the last parameter."""
    counts = [parameter.numel() for parameter in reversed(parameters(model))]
    parts = np.split(whole, np.cumsum(counts)[:-1])[::-1]
    return np.concatenate([parts[0], parts[2]])


def half_types_are_those_of_torchs_hook() -> None:
    """Of a scaled loss: torch divides before it adds, and the smallest numbers lose bits.

    Its hook for bfloat16 refuses gradients on the host.
    """
    if hvd.size() != 2:
        return  # a division by 3 rounds
    model, other = dense().float(), dense().float()
    with nodes_of_their_own():
        optimizer = wrapped(model, "half:type=fp16")
    parallel = DistributedDataParallel(other)
    parallel.register_comm_hook(None, fp16_compress_hook)
    for step in range(3):
        inputs, labels = (share(tensor, hvd.rank()) for tensor in batch(step))
        for each in (model, parallel):
            each.zero_grad()
            (F.cross_entropy(each(inputs.float()), labels) * 4096).backward()
        optimizer.synchronize()
        assert all(map(torch.equal, gradients(model), gradients(other))), step


@case
def exchanges_are_those_of_torch_distributed() -> None:
    one_host = context.current().topology.local_size == hvd.size()
    on_host = torch.get_default_device().type == "cpu"
    if hvd.size() == 1 or not one_host or not on_host or distributed.is_initialized():
        return
    with gloo():
        averages_are_those_of_torchs_own_optimizer()
        power_sgd_is_that_of_torchs_hook()
        half_types_are_those_of_torchs_hook()
