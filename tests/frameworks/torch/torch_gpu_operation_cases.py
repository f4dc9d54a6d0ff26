"""Named operations on tensors of a device, against formulas of the rank."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch

import hvdtrain.torch as hvd
from hvdtrain.core import context
from hvdtrain.errors import MismatchError

CASES: list[Callable[[], None]] = []
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def case(function: Callable[[], None]) -> Callable[[], None]:
    """Add a function to the table."""
    CASES.append(function)
    return function


def device() -> torch.device:
    """Return that on which tensors are made here."""
    return torch.empty(0).device


def busy() -> None:
    """Keep the current stream busy for a while, so that what does not wait for it is seen."""
    if device().type == "cuda":
        torch.cuda._sleep(20_000_000)


def ramp(rank: int, *shape: int) -> torch.Tensor:
    """Return what a rank gives: small whole numbers, which every type holds, and their sums."""
    count = prod(shape)
    return (torch.arange(count) % 7 + rank + 1).reshape(shape)


def all_ramps(*shape: int) -> torch.Tensor:
    """Return what all ranks give, in float64, one after the other."""
    return torch.stack([ramp(rank, *shape).double() for rank in range(hvd.size())])


def check(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, what: object) -> None:
    """Compare values, type, shape and device."""
    assert (got.dtype, got.device) == (dtype, device()), (what, got.dtype, got.device)
    assert got.shape == expected.shape, (what, got.shape, expected.shape)
    few = 4 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    expected = expected.to(dtype).double()
    assert torch.allclose(got.double(), expected, rtol=few, atol=few), (what, got, expected)


@case
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


@case
def factors_before_and_after() -> None:
    ramps = all_ramps(40)
    for dtype in FLOATS:
        got = hvd.allreduce(
            ramp(hvd.rank(), 40).to(dtype), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0
        )
        check(got, 2 * ramps.sum(0), dtype, dtype)


@case
def every_movement_of_every_type() -> None:
    n, r = hvd.size(), hvd.rank()
    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64):

        def of(rank: int, *shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return (ramp(rank, *shape) % 3).to(dtype)

        got = hvd.allgather(of(r, r + 1, 2))
        assert torch.equal(got, torch.cat([of(k, k + 1, 2) for k in range(n)])), dtype
        assert torch.equal(hvd.broadcast(of(r, 4), n - 1), of(n - 1, 4)), dtype
        there = of(r, 4)
        assert hvd.broadcast_(there, 0) is there
        assert torch.equal(there, of(0, 4)), dtype
        splits = torch.tensor([k + 1 for k in range(n)], device="cpu")
        total = int(splits.sum())
        got, counts = hvd.alltoall(of(r, total, 2), splits)
        start = r * (r + 1) // 2
        parts = [of(k, total, 2)[start : start + r + 1] for k in range(n)]
        assert torch.equal(got, torch.cat(parts)), dtype
        assert counts.tolist() == [r + 1] * n
        assert got.device == there.device == device()


@case
def sums_that_are_scattered() -> None:
    n, r = hvd.size(), hvd.rank()
    for dtype in (*FLOATS, *INTEGERS):
        rows = 2 * n + 1
        got = hvd.reducescatter(ramp(r, rows, 3).to(dtype), op=hvd.Sum)
        whole = all_ramps(rows, 3).sum(0)
        counts = [rows // n + (k < rows % n) for k in range(n)]
        start = sum(counts[:r])
        check(got, whole[start : start + counts[r]], dtype, dtype)


@case
def grouped() -> None:
    shapes = [(3,), (0, 2), (4, 5), ()]
    for name, dtype in (("f", torch.float32), ("h", torch.bfloat16), ("i", torch.int32)):
        mine = [ramp(hvd.rank(), *shape).to(dtype) for shape in shapes]
        for got, shape in zip(
            hvd.grouped_allreduce(mine, name=name, op=hvd.Sum), shapes, strict=True
        ):
            check(got, all_ramps(*shape).sum(0), dtype, shape)
        hvd.grouped_allreduce_(mine, name=name, op=hvd.Sum)
        for got, shape in zip(mine, shapes, strict=True):
            check(got, all_ramps(*shape).sum(0), dtype, shape)
    gathered = hvd.grouped_allgather([ramp(hvd.rank(), 2), ramp(hvd.rank(), 1, 3)])
    check(gathered[0], all_ramps(2).flatten(), torch.int64, "grouped_allgather")
    scattered = hvd.grouped_reducescatter([ramp(hvd.rank(), hvd.size(), 2)], op=hvd.Sum)
    check(scattered[0], all_ramps(hvd.size(), 2).sum(0)[hvd.rank()][None], torch.int64, "scatter")


@case
def memory_orders() -> None:
    n, r = hvd.size(), hvd.rank()
    base = ramp(r, 4, 6).double()
    total = all_ramps(4, 6).sum(0)
    for name, view in {
        "transposed": lambda t: t.t(),
        "every other": lambda t: t[::2, 1::2],
        "expanded": lambda t: t[:1].expand(3, 6),
        "a slice": lambda t: t[1:3],
        "one": lambda t: t[2, 3],
        "none": lambda t: t[:0],
    }.items():
        check(hvd.allreduce(view(base), op=hvd.Sum), view(total), torch.float64, name)
        if name != "expanded":
            copy = base.clone()
            hvd.allreduce_(view(copy), op=hvd.Sum)
            check(view(copy), view(total), torch.float64, (name, "in place"))
    images = ramp(r, 2, 3, 4, 4).float().contiguous(memory_format=torch.channels_last)
    check(hvd.allreduce(images, op=hvd.Sum), all_ramps(2, 3, 4, 4).sum(0), torch.float32, "images")
    columns = base.t()
    hvd.broadcast_(columns, n - 1)
    check(columns, ramp(n - 1, 4, 6).t(), torch.float64, "columns")


@case
def many_elements() -> None:
    count = (1 << 24) + 3
    for dtype in (torch.float32, torch.bfloat16):
        got = hvd.allreduce(torch.full((count,), hvd.rank() + 1.0, dtype=dtype), op=hvd.Sum)
        assert bool((got == hvd.size() * (hvd.size() + 1) / 2).all()), dtype


@case
def process_sets() -> None:
    n, r = hvd.size(), hvd.rank()
    if n == 1:
        return
    last = hvd.add_process_set([n - 1])
    ends = hvd.add_process_set([0, n - 1]) if n > 2 else hvd.global_process_set
    members = sorted({0, n - 1})
    if r in members:
        total = all_ramps(5)[members].sum(0)
        got = hvd.allreduce(ramp(r, 5).float(), op=hvd.Sum, process_set=ends)
        check(got, total, torch.float32, "ends")
        gathered = hvd.allgather(ramp(r, r + 1), process_set=ends)
        assert torch.equal(gathered, torch.cat([ramp(k, k + 1) for k in members]))
    if r == n - 1:
        got = hvd.allreduce(ramp(r, 5).float(), op=hvd.Sum, process_set=last)
        check(got, ramp(r, 5), torch.float32, "last")
    both = hvd.allreduce(ramp(r, 2).float(), op=hvd.Sum)
    check(both, all_ramps(2).sum(0), torch.float32, "all")
    if n > 2:
        hvd.remove_process_set(ends)
    hvd.remove_process_set(last)


@case
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


@case
def handles_in_different_orders() -> None:
    n, r = hvd.size(), hvd.rank()
    order = list(range(20))
    order = order[r * 5 :] + order[: r * 5]
    handles = {}
    for number in order:
        busy()
        handles[number] = hvd.allreduce_async(
            torch.full((number * 100 + 1,), float(number + r)), name=f"many {number}", op=hvd.Sum
        )
        torch.full((number * 100 + 1,), float("nan"))  # in the memory of the input, were it free
    for number in reversed(range(20)):
        got = hvd.synchronize(handles[number])
        assert bool((got == sum(number + k for k in range(n))).all()), number
        assert hvd.poll(handles[number])


@case
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


@case
def gradients_flow() -> None:
    n, r = hvd.size(), hvd.rank()
    mine = ramp(r, 4).double().requires_grad_()
    (hvd.allreduce(mine, op=hvd.Sum) * (r + 1)).sum().backward()
    assert mine.grad is not None
    check(mine.grad, torch.full((4,), n * (n + 1) / 2), torch.float64, "allreduce")
    mine.grad = None
    (hvd.allgather(mine) * (r + 1)).sum().backward()
    assert mine.grad is not None
    # As Horovod's; NCCL divides before it adds.
    assert torch.allclose(mine.grad, torch.full((4,), (n + 1) / 2).double(), rtol=1e-15)


@case
def adasum() -> None:
    n, r = hvd.size(), hvd.rank()
    for dtype in (torch.float32, torch.float64, torch.float16):
        orthogonal = torch.zeros(8)
        orthogonal[r] = r + 1.0
        got = hvd.allreduce(orthogonal.to(dtype), op=hvd.Adasum)
        assert got.device == device()
        assert got.tolist() == [float(k + 1) if k < n else 0.0 for k in range(8)], (dtype, got)
        equal = hvd.allreduce(torch.full((5,), 3.0, dtype=dtype), op=hvd.Adasum)
        assert torch.allclose(equal.float(), torch.full((5,), 3.0), rtol=2e-3), (dtype, equal)


@case
def sparse_tensors() -> None:
    n, r = hvd.size(), hvd.rank()
    places, rows = torch.tensor([[r, n]]), torch.tensor([[1.0, 2.0], [r + 1.0, 0.0]])
    own = torch.sparse_coo_tensor(places, rows, (n + 1, 2), check_invariants=True)
    got = hvd.synchronize(hvd.sparse_allreduce_async(own, "rows", op=hvd.Sum)).to_dense()
    expected = torch.tensor([[1.0, 2.0]] * n + [[n * (n + 1) / 2, 0.0]])
    assert torch.equal(got, expected), got


@case
def parameters_and_state() -> None:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (hvd.rank() + 1))
    model(torch.randn(5, 3)).square().sum().backward()
    if hvd.rank() == 0:
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    state = [*model.state_dict().values(), *(s["exp_avg"] for s in optimizer.state.values())]
    for tensor in state:
        assert tensor.device == device()
        every = hvd.allgather(tensor.detach().reshape(1, -1))
        assert torch.equal(every, every[:1].expand_as(every))


@case
def ranks_that_are_done_join() -> None:
    r = hvd.rank()
    for step in range(r + 1):
        got = hvd.allreduce(torch.ones(3), name=f"uneven {step}", op=hvd.Sum)
        assert got.tolist() == [float(hvd.size() - step)] * 3
    assert hvd.join() == hvd.size() - 1


@case
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
