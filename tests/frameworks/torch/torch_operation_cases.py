"""Operations of hvdtrain.torch on each rank, against formulas of the rank."""

import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import cloudpickle
import torch
from process_sets import assert_lists_are_refused
from torch_training import ranks_sum, refused

import hvdtrain.torch as hvd
from hvdtrain.errors import MismatchError

INTEGERS = (
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)


def mine(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    count = int(torch.tensor(shape).prod())
    return (torch.arange(count) + hvd.rank() + 1).reshape(shape).to(dtype)


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare without importing torch.testing, which takes seconds on each rank."""
    return got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-15, atol=0)


def average_of_the_largest_numbers() -> None:
    for dtype in INTEGERS:
        for extreme in (torch.iinfo(dtype).max, torch.iinfo(dtype).min):
            values = torch.tensor([extreme if hvd.rank() == 0 else 0], dtype=dtype)
            quotient = abs(extreme) // hvd.size()
            expected = quotient if extreme > 0 else -quotient
            mean = hvd.allreduce(values)
            assert (mean.dtype, mean.tolist()) == (dtype, [expected]), (mean, extreme)
            scattered = hvd.reducescatter(values.repeat(hvd.size()), op=hvd.Average)
            assert scattered.tolist() == [expected], (dtype, extreme)


def odd_tensors() -> None:
    n = hvd.size()
    transposed = mine(2, 3).t()
    expected = torch.arange(6.0, dtype=torch.float64).reshape(2, 3).t() + (n + 1) / 2
    assert close(hvd.allreduce(transposed), expected)
    scalar = torch.tensor(float(hvd.rank()))
    assert hvd.allreduce(scalar).shape == ()
    assert hvd.allreduce(scalar, op=hvd.Sum).item() == ranks_sum() - n
    assert hvd.allreduce(torch.empty(0, 3)).shape == (0, 3)
    needs_gradient = mine(2).requires_grad_()
    assert close(hvd.allreduce(needs_gradient), mine(2) - hvd.rank() - 1 + (n + 1) / 2)


def allgather() -> None:
    n, r = hvd.size(), hvd.rank()
    gathered = hvd.allgather(torch.full((r + 1, 2), r))
    assert torch.equal(gathered, torch.cat([torch.full((k + 1, 2), k) for k in range(n)]))
    assert hvd.allgather(torch.tensor(r)).tolist() == list(range(n))
    rows = 0 if r == n - 1 else 2
    assert hvd.allgather(torch.ones(rows, 3)).shape == (2 * (n - 1), 3)
    assert hvd.allgather(torch.full((1,), r, dtype=torch.bfloat16)).tolist() == list(range(n))
    assert hvd.allgather(torch.tensor([r % 2 == 0])).tolist() == [k % 2 == 0 for k in range(n)]


def broadcast() -> None:
    last = hvd.size() - 1
    tensor = mine(3)
    assert hvd.broadcast(tensor, last).tolist() == [last + 1, last + 2, last + 3]
    assert tensor.tolist() == mine(3).tolist()
    hvd.broadcast_(tensor, 0)
    assert tensor.tolist() == [1, 2, 3]
    columns = mine(2, 3).t()
    hvd.broadcast_(columns, last)
    assert columns[0, 0].item() == last + 1
    assert columns[1, 0].item() == last + 2


def root_that_is_no_rank() -> None:
    for root_rank in (-1, hvd.size()):
        message = refused(ValueError, partial(hvd.broadcast, torch.ones(1), root_rank))
        assert f"root_rank {root_rank} is not one of ranks {list(range(hvd.size()))}" in message


def objects_that_pickle_refuses() -> None:
    n, r = hvd.size(), hvd.rank()

    class Local:
        rank = r

    assert hvd.broadcast_object(lambda: r + 1, n - 1)() == n
    assert [kind().rank for kind in hvd.allgather_object(Local)] == list(range(n))
    lock = partial(hvd.allgather_object, threading.Lock())
    assert f"[rank 0/{n}]: this lock cannot be sent" in refused(TypeError, lock)
    sys.modules["cloudpickle"] = None  # type: ignore[assignment]  # as if not installed
    try:
        local = partial(hvd.allgather_object, Local)
        assert "pip install cloudpickle" in refused(TypeError, local)
    finally:
        sys.modules["cloudpickle"] = cloudpickle


def what_is_no_tensor() -> None:
    operations: list[Callable[[Any], object]] = [
        *(hvd.allreduce, hvd.allreduce_, hvd.allreduce_async),
        *(hvd.allgather, hvd.allgather_async, hvd.reducescatter, hvd.reducescatter_async),
        *(hvd.alltoall, hvd.alltoall_async, lambda value: hvd.grouped_allreduce([value])),
        *(partial(call, root_rank=0) for call in (hvd.broadcast, hvd.broadcast_)),
    ]
    for operation in operations:
        message = refused(TypeError, partial(operation, 3.0))
        assert message == "expected a torch tensor, got float: wrap it in torch.as_tensor()"


def process_sets_that_are_lists() -> None:
    module = torch.nn.Linear(2, 2)
    arguments = {
        "tensor": torch.ones(hvd.size()), "tensors": [torch.ones(hvd.size())], "name": "it",
        "obj": 1, "root_rank": 0, "optimizer": torch.optim.SGD(module.parameters(), 0.1),
        "op": hvd.Sum, "num_features": 2,
        "sparse_allreduce_async": {"tensor": torch.ones(2).to_sparse()},
    }  # fmt: skip
    assert_lists_are_refused(hvd, arguments, 25)


def arguments_that_make_no_sense() -> None:
    sparse = partial(hvd.allreduce, torch.ones(2).to_sparse())
    assert "sparse_allreduce_async()" in refused(ValueError, sparse)
    least = partial(hvd.allreduce, torch.ones(1, dtype=torch.complex64), op=hvd.Min)
    assert "min of complex64" in refused(ValueError, least)
    scattered = partial(hvd.reducescatter, torch.ones(hvd.size()), op=hvd.Adasum)
    assert "Adasum" in refused(hvd.HorovodInternalError, scattered)
    assert "state_dict()" in refused(ValueError, partial(hvd.broadcast_parameters, torch.ones(1)))
    one, wrong = torch.ones(1), "sum"
    both = partial(hvd.allreduce, one, average=True, op=hvd.Sum)
    assert "pass only op" in refused(ValueError, both)
    bad_op = partial(hvd.allreduce, one, op=wrong)  # type: ignore[arg-type]
    assert "op must be" in refused(ValueError, bad_op)
    # A name of any type is taken for what it prints.
    assert hvd.allreduce(torch.ones(1), name=7).item() == 1  # type: ignore[arg-type]


def ranks_that_differ_are_all_told() -> None:
    """In a first call, and in those after it, which are known."""
    n, r = hvd.size(), hvd.rank()
    if n == 1:
        return
    ones, other = torch.ones(3, 4), r == 1
    differing: dict[str, Callable[[str | None], object]] = {
        "shape": lambda name: hvd.allreduce(torch.ones(3, 4 + other), name=name, op=hvd.Sum),
        "dtype": lambda name: hvd.allreduce(ones.double() if other else ones, name=name),
        "op": lambda name: hvd.allreduce(ones, name=name, op=hvd.Sum if other else hvd.Average),
        "prescale": lambda name: hvd.allreduce(ones, name=name, prescale_factor=1.0 + other),
        "root_rank": lambda name: hvd.broadcast(ones, int(other), name),
        "shape beyond the first": lambda name: hvd.allgather(torch.ones(2, 4 + other), name),
        "operation": lambda name: (
            hvd.broadcast(ones, 0, name) if other else hvd.allreduce(ones, name=name)
        ),
    }
    for repeats, (what, call) in product((0, 2), differing.items()):
        for name in ("fc", None) if what in ("shape", "dtype", "op", "prescale") else ("fc",):
            for dtype, op in product((torch.float32, torch.float64), (hvd.Sum, hvd.Average)):
                for _ in range(repeats):
                    total = hvd.allreduce(ones.to(dtype), name=name, op=op)
                    assert torch.equal(total, ones.to(dtype) * (n if op is hvd.Sum else 1))
            message = refused(MismatchError, partial(call, name))
            assert f"[rank {r}/{n}]" in message, message
            assert "rank 1 sent" in message, message
            assert (name or "allreduce") in message, message
            assert what in message or what == "operation", message
    assert hvd.allreduce(torch.tensor([float(r)]), op=hvd.Sum).item() == ranks_sum() - n


def initialised_again() -> None:
    before = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
    hvd.shutdown()
    hvd.shutdown()
    assert not hvd.is_initialized()
    assert not hvd.mpi_enabled()
    assert hvd.global_process_set.ranks == []
    hvd.init()
    hvd.init()
    assert hvd.is_initialized()
    assert before == (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    hvd.barrier()


def numbers_of_operations_in_other_threads() -> None:
    """Operations without a name in one thread, beside named ones in another."""
    n, results = hvd.size(), dict[str, float]()

    def work(name: str) -> None:
        for number in range(30):
            tensor = torch.full((4,), float(hvd.rank() + number))
            total = hvd.allreduce(tensor, name=name, op=hvd.Sum)
            assert total.tolist() == [n * number + ranks_sum() - n] * 4
        results[name] = total[0].item()

    threads = [threading.Thread(target=work, args=[name]) for name in ("thread a", "thread b")]
    for thread in threads:
        thread.start()
    for number in range(30):
        total = hvd.allreduce(torch.tensor([float(number)]), op=hvd.Sum)
        assert total.item() == n * number
    for thread in threads:
        thread.join()
    assert set(results.values()) == {n * 29 + ranks_sum() - n}
