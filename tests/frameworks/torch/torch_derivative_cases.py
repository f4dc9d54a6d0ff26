"""First and second derivatives of what ranks do together, against those that one process computes.

One process would see the inputs of all ranks, and so does `together`: ranks pass equal ones, and
get equal outputs. Numerical derivatives of that are those of one process.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.gradcheck import gradcheck, gradgradcheck
from torch_training import drawn, refused

import hvdtrain.torch as hvd


class OfThisRank(torch.autograd.Function):
    """Of a vector that is equal on all ranks, the elements of this rank."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return whole.split(list(counts))[hvd.rank()].clone()

    @staticmethod
    def backward(ctx: Any, own: torch.Tensor) -> Any:
        return OfAllRanks.apply(own), None


class OfAllRanks(torch.autograd.Function):
    """The elements of all ranks in a vector, equal on all of them."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor) -> torch.Tensor:
        ctx.counts = hvd.allgather(torch.tensor([len(own)])).tolist()
        return hvd.allgather(own.detach())

    @staticmethod
    def backward(ctx: Any, whole: torch.Tensor) -> Any:
        return OfThisRank.apply(whole, ctx.counts)


def together(
    function: Callable[..., Any],
    factor: float,
    shapes: Sequence[Sequence[int]],
    whole: torch.Tensor,
    *shared: torch.Tensor,
) -> torch.Tensor:
    """Return what all ranks get, of inputs of their own and of inputs that they share.

    Gradients are divided by the factor of a convention.
    """
    own = OfThisRank.apply(whole, [math.prod(shape) for shape in shapes])
    inputs = [own.reshape(shapes[hvd.rank()]) ** 3]
    inputs += [
        OfThisRank.apply(each.repeat(hvd.size()), [len(each)] * hvd.size()) for each in shared
    ]
    outputs = function(*inputs)
    flat = torch.cat(
        [
            output.flatten()
            for output in (outputs if isinstance(outputs, Sequence) else [outputs])
            if output.is_floating_point()
        ]
    )
    scaled = flat / factor + (flat * (1 - 1 / factor)).detach()
    result: torch.Tensor = OfAllRanks.apply(scaled**2)
    return result


def normalized(own: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    layer = hvd.SyncBatchNorm(2, track_running_stats=False).double()
    parameters = {"weight": weight, "bias": bias}
    result: torch.Tensor = torch.func.functional_call(layer, parameters, own)
    return result


def derivatives_are_those_of_one_process() -> None:
    """Gradients are those of the sum of all ranks' losses, times a factor."""
    n = hvd.size()
    pair, each, more = [(2, 2)] * n, [(n, 2)] * n, [(n + 1, 2)] * n
    uneven = [(0 if rank == n - 1 else rank + 1, 2) for rank in range(n)]
    table: list[tuple[Callable[..., Any], float, Sequence[Sequence[int]]]] = [
        (hvd.allreduce, 1, pair),
        (partial(hvd.allreduce, op=hvd.Sum, prescale_factor=0.5), 1, pair),
        (lambda x: hvd.grouped_allreduce([x, x.sum()], op=hvd.Sum), 1, pair),
        (lambda x: hvd.grouped_allgather([x, x.sum()]), 1 / n, uneven),
        (partial(hvd.broadcast, root_rank=n - 1), 1 / n, pair),
        (hvd.alltoall, 1, each),
        (partial(hvd.alltoall, splits=[1] * n), 1, more),
        (hvd.reducescatter, n, more),
        (partial(hvd.reducescatter, op=hvd.Sum, postscale_factor=0.5), n, more),
        (lambda x: hvd.grouped_reducescatter([x, x[:n]]), n, more),
        (normalized, 1, [*uneven[:-1], (3, 2)]),
    ]
    for function, factor, shapes in table:
        whole = drawn(1, sum(math.prod(shape) for shape in shapes)).requires_grad_()
        shared = [drawn(2, 2).requires_grad_() for _ in "wb" if function is normalized]
        compared = partial(together, function, factor, shapes)
        assert gradcheck(compared, [whole, *shared], fast_mode=True)
        upstream = drawn(3, compared(whole, *shared).numel()).requires_grad_()
        assert gradgradcheck(compared, [whole, *shared], upstream, fast_mode=True)


def reductions_without_a_gradient_refuse_it() -> None:
    x = torch.ones(hvd.size(), requires_grad=True)
    for op in (hvd.Max, hvd.Min, hvd.Product, hvd.Adasum):
        message = refused(ValueError, hvd.allreduce(x, op=op).sum().backward)
        assert f"allreduce with op={op.value} has no gradient: use Average or Sum" in message
    message = refused(ValueError, hvd.reducescatter(x, op=hvd.Max).sum().backward)
    assert "reducescatter with op=" in message
