"""All-reduces of hvdtrain.torch that a program calls again and again, against formulas."""

import gc
from typing import Any
from unittest.mock import patch

import torch
from torch_operation_cases import mine
from torch_training import ranks_sum

import hvdtrain.torch as hvd
from hvdtrain.core import context
from hvdtrain.errors import HvdtrainError


def total(values: torch.Tensor) -> torch.Tensor:
    n = hvd.size()
    return n * values + n * (n - 1) // 2


def templates_beside_single_operations_and_groups() -> None:
    """Some ranks vote by a template, others with an operation, as autograd must record it.

    Numbers are around what is added by every rank, and around the size of a chunk.
    """
    for count in (0, 1, 3000, 16_385, 32_768, 32_769, 65_536, 65_537, 300_001):
        positions = torch.arange(count) % 1000
        for round in range(5):
            tensor = (positions + hvd.rank() + round).float()
            if round > 1 and round % hvd.size() == hvd.rank():
                tensor.requires_grad_()
            result = hvd.allreduce(tensor, name=f"mixed {count}", op=hvd.Sum)
            assert torch.equal(result.detach(), total(positions + round).float()), (count, round)
            assert torch.equal(tensor.detach(), (positions + hvd.rank() + round).float())
        group = [positions + hvd.rank(), torch.full((3, 2), hvd.rank()), torch.zeros(0).long()]
        for dtype in (torch.float32, torch.int64):
            tensors = [tensor.to(dtype) for tensor in group]
            for _ in range(2):
                sums = hvd.grouped_allreduce(tensors, name=f"group {count}", op=hvd.Sum)
                assert torch.equal(sums[0], total(positions).to(dtype))
                assert torch.equal(sums[1], total(torch.zeros(3, 2)).to(dtype))
                assert sums[2].shape == (0,)


def repeated_sums_in_memory_of_the_engine() -> None:
    """In place and not, at equal places on all ranks, and at others."""
    memory = context.current().world.communicator.empty(1 << 20)
    whole = torch.as_tensor(memory).view(torch.float32)
    positions = torch.arange(100_000) % 1000
    for place, start in (("equal", 0), ("other", 1000 * hvd.rank())):
        part = whole[start : start + 100_000]
        for round in range(3):
            part.copy_(positions + hvd.rank() + round)
            result = hvd.allreduce(part, name=f"{place} place", op=hvd.Sum)
            assert torch.equal(result, total(positions + round).float())
            hvd.allreduce_(part, name=f"{place} place", op=hvd.Sum)
            assert torch.equal(part, total(positions + round).float())


def repeated_sums_of_types_that_are_converted() -> None:
    n, r = hvd.size(), hvd.rank()
    for round in range(3):
        for dtype in (torch.float16, torch.bfloat16):
            for name in (f"half {dtype}", None):
                tensor = (torch.arange(50) % 7 + r + round).to(dtype)
                expected = total(torch.arange(50) % 7 + round).to(dtype)
                for result in (
                    hvd.allreduce(tensor, name=name, op=hvd.Sum),
                    hvd.synchronize(hvd.allreduce_async(tensor, name=name, op=hvd.Sum)),
                ):
                    assert result.dtype is dtype
                    assert torch.equal(result, expected)
                handle = hvd.allreduce_async_(tensor, name=name, op=hvd.Sum)
                assert hvd.synchronize(handle) is tensor
                assert torch.equal(tensor, expected)
        flags = torch.tensor([True, False, r == 0, r != round % n])
        everywhere = hvd.allreduce(flags, name="flags", op=hvd.Min)
        assert everywhere.tolist() == [True, False, n == 1, False]
        assert hvd.allreduce_(flags, name="any", op=hvd.Max) is flags
        assert flags.tolist() == [True, False, True, n > 1]


def tensors_that_have_changed_since_the_last_call() -> None:
    """Each as the first tensor of the template, and the same tensor in another shape or layout."""
    n, r = hvd.size(), hvd.rank()
    square = mine(4, 4)
    for _ in range(2):
        assert torch.equal(
            hvd.allreduce(square, name="changed", op=hvd.Max), mine(4, 4) + n - r - 1
        )
    square.t_()
    assert torch.equal(
        hvd.allreduce(square, name="changed", op=hvd.Max), (mine(4, 4) + n - r - 1).t()
    )
    square.resize_(2, 8)
    expected = (mine(16) + n - r - 1).reshape(2, 8)
    assert torch.equal(hvd.allreduce(square, name="changed", op=hvd.Max), expected)
    numbers = torch.full((3,), complex(r + 1, 2 * r))
    for values in (numbers, numbers.conj(), numbers, numbers.conj()):
        sums = hvd.allreduce(values, name="conjugate", op=hvd.Sum)
        imaginary = n * (n - 1) * (-1 if values.is_conj() else 1)
        assert sums.tolist() == [complex(ranks_sum(), imaginary)] * 3
    for values in (numbers.imag[:1], numbers.conj().imag[:1], numbers.imag[:1].clone()):
        sums = hvd.allreduce(values, name="negative", op=hvd.Sum)
        assert sums.item() == n * (n - 1) * (-1 if values.is_neg() else 1)
    weight = mine(3).requires_grad_()
    for tensor in (mine(3), weight, mine(3), weight):
        result = hvd.allreduce(tensor, name="weight", op=hvd.Sum)
        assert result.requires_grad is tensor.requires_grad
        assert torch.equal(result.detach(), total(torch.arange(3) + 1).double())


def finalizers_submit_operations_while_others_begin() -> None:
    """The garbage collector may call them wherever a tensor is made, as here.

    Those that would wait for their own thread are refused.
    """
    handles, refused = list[Any](), list[str]()
    plain = torch.empty_like

    class Owner:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            handles.append(hvd.allreduce_async(torch.ones(2), name="last words", op=hvd.Sum))
            try:
                hvd.allreduce(torch.ones(2), name="more words")
            except HvdtrainError as error:
                refused.append(str(error))

    def collecting(*arguments: Any, **options: Any) -> torch.Tensor:
        gc.collect()
        return plain(*arguments, **options)

    values = torch.full((3,), 1.0 + hvd.rank())
    for turn in range(4):
        with patch.object(torch, "empty_like", collecting if turn == 3 else plain):
            if turn == 3:
                Owner()
            assert hvd.allreduce(values, name="words", op=hvd.Sum).tolist() == [ranks_sum()] * 3
    gc.collect()
    assert [hvd.synchronize(handle).tolist() for handle in handles] == [[hvd.size()] * 2]
    assert all("'more words' was called by a finalizer" in message for message in refused)
