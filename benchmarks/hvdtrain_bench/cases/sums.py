"""Sums of tensors whose result is known, and their check."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

import torch

from hvdtrain.errors import HvdtrainError
from hvdtrain_bench.harness.turns import Contender

if TYPE_CHECKING:
    from hvdtrain_bench.cases.peers import Peer
    from hvdtrain_bench.harness.ranks import Ranks

# Elements are checked in pieces, so that the check does not need as much memory as the tensor.
_PIECE = 1 << 16
_PATTERN = 1.0 + torch.arange(_PIECE, dtype=torch.float32) % 8
# Repeated sums grow by the number of ranks with each call, and must stay within a float32.
_LARGEST = 1e30


class WrongResultError(HvdtrainError):
    """A library returned a wrong result."""


def fill(tensor: torch.Tensor, factor: float) -> None:
    """Write factor * (1 + i mod 8) into element i of a flat float32 tensor."""
    for start in range(0, tensor.numel(), _PIECE):
        piece = tensor[start : start + _PIECE]
        torch.mul(_PATTERN[: piece.numel()], factor, out=piece)


def require_factor(tensor: torch.Tensor, factor: float, what: str) -> None:
    """Check that element i is factor * (1 + i mod 8), up to rounding."""
    for start in range(0, tensor.numel(), _PIECE):
        piece = tensor[start : start + _PIECE]
        expected = _PATTERN[: piece.numel()] * factor
        if not torch.allclose(piece, expected, rtol=1e-5, atol=0.0):
            wrong = int((~torch.isclose(piece, expected, rtol=1e-5, atol=0.0)).nonzero()[0])
            raise WrongResultError(
                f"{what}: element {start + wrong} is {float(piece[wrong])}, but must be "
                f"{float(expected[wrong])}: this library does not sum right here"
            )


def sum_factor(ranks: int, calls: int) -> float:
    """Return the factor after `calls` in-place sums when rank r began with the factor r + 1.

    The first gives sum_r (r + 1) = n(n+1)/2 on every rank, and each further one n times that.
    """
    return ranks * (ranks + 1) / 2 * float(ranks) ** (calls - 1)


def most_calls(ranks: int) -> int:
    """Return how many in-place sums fit into the range of a float32."""
    return int(log(_LARGEST / (8 * sum_factor(ranks, 1))) / log(max(ranks, 2)))


def sum_contender(ranks: Ranks, peer: Peer, tensor: torch.Tensor) -> Contender:
    """Return a contender that sums a flat float32 tensor in each call; one check covers all."""
    latest = [tensor]

    def prepare() -> None:
        fill(tensor, ranks.rank + 1)
        latest[0] = tensor

    def call() -> None:
        latest[0] = peer.reduce(latest[0])

    def check(calls: int) -> None:
        what = f"{ranks.title} {peer.name}"
        require_factor(latest[0], sum_factor(ranks.size, calls), what)
        latest[0] = tensor

    return Contender(
        peer.name, peer.library, prepare, call, check, most_calls(ranks.size), turn=peer.turn
    )
