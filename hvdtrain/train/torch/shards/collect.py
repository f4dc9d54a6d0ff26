"""Weights and optimizer state, brought from the servers to all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

import hvdtrain.torch as hvd
from hvdtrain.train.parameter_server.shards import Piece
from hvdtrain.train.torch.shards.flat_parameters import FlatParameters
from hvdtrain.train.torch.shards.shard import PieceState, TorchShard

__all__ = ["Outlines", "collect_state", "collect_weights"]

# The pieces of each server with their states, by the server's rank.
Outlines = Mapping[int, Sequence[tuple[Piece, PieceState]]]
# Where each server's shard begins and ends in the row of all parameters, by the server's rank.
Bounds = Mapping[int, tuple[int, int]]


def collect_weights(flat: FlatParameters, bounds: Bounds) -> None:
    """Overwrite the parameters with the servers' weights (collective).

    Args:
        flat: parameters; on a server `weights` holds those of its shard.
        bounds: bounds of the servers' shards.
    """
    _broadcast_shards(flat.weights, bounds, "weights")
    flat.write_weights()


def collect_state(
    optimizer: torch.optim.Optimizer,
    flat: FlatParameters,
    bounds: Bounds,
    outlines: Outlines,
    shard: TorchShard | None,
) -> None:
    """Overwrite the state of the optimizer of the whole parameters (collective).

    Args:
        optimizer: optimizer of the whole parameters.
        flat: its parameters.
        bounds: bounds of the servers' shards.
        outlines: outline of each server's shard.
        shard: shard of this rank; None on a worker.
    """
    of_pieces = [state for outline in outlines.values() for _, state in outline]
    types = {n: v for state in of_pieces for n, v in state.items() if isinstance(v, torch.dtype)}
    memory = {name: torch.zeros(sum(flat.sizes), dtype=types[name]) for name in sorted(types)}
    for name, whole in memory.items():
        if shard is not None:
            begin, end = bounds[hvd.rank()]
            shard.write_state(name, whole[begin:end])
        _broadcast_shards(whole, bounds, name)
    for server, outline in outlines.items():
        for piece, state in outline:
            parameter = flat.parameters[piece.parameter]
            for name, value in state.items():
                if isinstance(value, torch.dtype):
                    start = bounds[server][0] + piece.start
                    part = memory[name].narrow(0, start, piece.count)
                    _part_of(optimizer, parameter, name, value, piece).copy_(part)
                else:
                    optimizer.state[parameter][name] = value


def _part_of(
    optimizer: torch.optim.Optimizer,
    parameter: torch.nn.Parameter,
    name: str,
    dtype: torch.dtype,
    piece: Piece,
) -> torch.Tensor:
    """Return the memory of a piece in the state of the whole parameter."""
    state = optimizer.state[parameter]
    if name not in state:
        state[name] = torch.zeros_like(
            parameter, dtype=dtype, memory_format=torch.contiguous_format, requires_grad=False
        )
    whole: torch.Tensor = state[name]
    return whole.view(-1).narrow(0, piece.begin, piece.count)


def _broadcast_shards(whole: torch.Tensor, bounds: Bounds, name: str) -> None:
    for server, (begin, end) in bounds.items():
        if begin < end:
            hvd.broadcast_(whole[begin:end], server, name=f"{name} of rank {server}")
