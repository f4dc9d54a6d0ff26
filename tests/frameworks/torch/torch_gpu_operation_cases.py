"""Named operations on tensors of a device, against formulas of the rank."""

from collections.abc import Callable
from math import prod

import pytest
import torch
from gpu_ranks import busy, device

import hvdtrain.torch as hvd
from hvdtrain.core import context
from hvdtrain.errors import MismatchError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def ramp(rank: int, *shape: int) -> torch.Tensor:
    """Return what a rank gives: small whole numbers, which every type holds, and their sums."""
    return (torch.arange(prod(shape)) % 7 + rank + 1).reshape(shape)


def all_ramps(*shape: int) -> torch.Tensor:
    return torch.stack([ramp(rank, *shape).double() for rank in range(hvd.size())])


def check(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, what: object) -> None:
    assert (got.dtype, got.device) == (dtype, device()), (what, got.dtype, got.device)
    assert got.shape == expected.shape, (what, got.shape, expected.shape)
    few = 4 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    expected = expected.to(dtype).double()
    assert torch.allclose(got.double(), expected, rtol=few, atol=few), (what, got, expected)


def every_reduction_of_every_type() -> None:
    ramps = all_ramps(3, 5)
    expected = {
        hvd.Sum: ramps.sum(0),
        hvd.Min: ramps.amin(0),
        hvd.Max: ramps.amax(0),
        hvd.Average: ramps.mean(0),
    }
    for dtype in (*FLOATS, *INTEGERS):
        mine = ramp(hvd.rank(), 3, 5).to(dtype)
        for op, values in expected.items():
            if op is hvd.Average and not dtype.is_floating_point:
                values = values.trunc()
            if op is hvd.Average and hvd.size() == 3:
                got = hvd.allreduce(mine, op=op).double()
                close = 4 * torch.finfo(dtype).eps if dtype.is_floating_point else 0
                assert torch.allclose(got, values, rtol=close, atol=0), (dtype, op)
                continue
            check(hvd.allreduce(mine, op=op), values, dtype, (dtype, op))
            copy = mine.clone()
            assert hvd.allreduce_(copy, op=op) is copy
            check(copy, values, dtype, (dtype, op, "in place"))
        check(mine, ramp(hvd.rank(), 3, 5), dtype, "the input stays")
        product = hvd.allreduce(mine[0, :2], op=hvd.Product)
        check(product, ramps[:, 0, :2].prod(0), dtype, (dtype, "product"))


def memory_orders() -> None:
    n, r = hvd.size(), hvd.rank()
    base, total = ramp(r, 4, 6).double(), all_ramps(4, 6).sum(0)
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        *(torch.t, lambda t: t[::2, 1::2], lambda t: t[:1].expand(3, 6)),
        *(lambda t: t[1:3], lambda t: t[2, 3], lambda t: t[:0]),
    ]
    for number, view in enumerate(views):
        check(hvd.allreduce(view(base), op=hvd.Sum), view(total), torch.float64, number)
        if number != 2:  # in which elements are one
            copy = base.clone()
            hvd.allreduce_(view(copy), op=hvd.Sum)
            check(view(copy), view(total), torch.float64, (number, "in place"))
    images = ramp(r, 2, 3, 4, 4).float().contiguous(memory_format=torch.channels_last)
    check(hvd.allreduce(images, op=hvd.Sum), all_ramps(2, 3, 4, 4).sum(0), torch.float32, "images")
    columns = base.t()
    hvd.broadcast_(columns, n - 1)
    check(columns, ramp(n - 1, 4, 6).t(), torch.float64, "columns")


def many_elements() -> None:
    count = (1 << 24) + 3
    for dtype in (torch.float32, torch.bfloat16):
        got = hvd.allreduce(torch.full((count,), hvd.rank() + 1.0, dtype=dtype), op=hvd.Sum)
        assert bool((got == hvd.size() * (hvd.size() + 1) / 2).all()), dtype


def inputs_that_are_still_being_computed() -> None:
    for number in range(5):
        busy()
        mine = torch.full((1000,), 0.0)
        mine += hvd.rank() + number
        got = hvd.allreduce(mine, op=hvd.Sum) * 2
        expected = 2.0 * sum(rank + number for rank in range(hvd.size()))
        assert bool((got == expected).all()), number
        busy()
        mine.fill_(hvd.rank() - number)
        hvd.allreduce_(mine, op=hvd.Sum)
        mine += 1
        assert bool((mine == 1.0 + sum(k - number for k in range(hvd.size()))).all()), number


def other_streams() -> None:
    if device().type != "cuda":
        return
    n, r = hvd.size(), hvd.rank()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for number in range(5):
        with torch.cuda.stream(side):
            busy()
            mine = torch.full((5000,), float(r + number))
            handle = hvd.allreduce_async(mine, name=f"side {number}", op=hvd.Sum)
            there = hvd.synchronize(handle) + 1
            inside = hvd.allreduce(mine, op=hvd.Sum) + 1
        torch.cuda.current_stream().wait_stream(side)
        expected = sum(k + number for k in range(n)) + 1
        assert bool((there == expected).all()), number
        assert bool((inside == expected).all()), number
        # Submitted on one stream and asked for on another.
        with torch.cuda.stream(side):
            busy()
            mine = torch.full((5000,), float(r - number))
            handle = hvd.allreduce_async(mine, name=f"across {number}", op=hvd.Sum)
        got = hvd.synchronize(handle) * 1
        assert bool((got == sum(k - number for k in range(n))).all()), number


def devices_that_differ() -> None:
    """Host memory and a GPU's go different ways to an engine that takes both."""
    on_cpu = hvd.allreduce(torch.ones(3, device="cpu"), op=hvd.Sum)
    assert on_cpu.device.type == "cpu"
    assert on_cpu.tolist() == [float(hvd.size())] * 3
    where = "cpu" if hvd.rank() == 0 else device()
    mine = torch.full((4,), hvd.rank() + 1.0, device=where)
    taken = context.current().world.communicator.capabilities.devices
    if hvd.size() > 1 and device().type in taken - {"cpu"}:
        with pytest.raises(MismatchError, match="device"):
            hvd.allreduce(mine, name="where", op=hvd.Sum)
        return
    got = hvd.allreduce(mine, name="where", op=hvd.Sum)
    assert got.device == mine.device
    assert got.tolist() == [hvd.size() * (hvd.size() + 1) / 2] * 4
