"""SyncBatchNorm on each rank, against torch's BatchNorm on the whole batch."""

import warnings

import pytest
import torch
from torch_training import grad_of

import hvdtrain.torch as hvd
from hvdtrain.data.sampling import GlobalBatchSampler


def check(rows: list[int], *shape: int, momentum: float | None, affine: bool) -> None:
    torch.manual_seed(5)
    whole = torch.randn(sum(rows), *shape).double() * 3 + 1e3
    factor = torch.randn(sum(rows), *shape).double()
    start = sum(rows[: hvd.rank()])
    mine = slice(start, start + rows[hvd.rank()])
    ours = hvd.SyncBatchNorm(shape[0], momentum=momentum, affine=affine).double()
    kind = torch.nn.BatchNorm1d if len(shape) == 1 else torch.nn.BatchNorm2d
    theirs = kind(shape[0], momentum=momentum, affine=affine).double()
    for step in range(2):
        x = whole[mine].clone().requires_grad_()
        y = whole.clone().requires_grad_()
        out, expected = ours(x + step), theirs(y + step)
        (out * factor[mine]).sum().backward()
        (expected * factor).sum().backward()
        assert torch.allclose(out, expected[mine], atol=1e-9)
        assert torch.allclose(grad_of(x), grad_of(y)[mine], atol=1e-9)
    for name, buffer in theirs.named_buffers():
        assert torch.allclose(ours.get_buffer(name).double(), buffer.double(), rtol=1e-9), name
    for mine_p, whole_p in zip(ours.parameters(), theirs.parameters(), strict=True):
        total = hvd.allreduce(grad_of(mine_p), op=hvd.Sum)
        assert torch.allclose(total, grad_of(whole_p), atol=1e-8)
    ours.eval()
    theirs.eval()
    assert torch.allclose(ours(whole), theirs(whole), atol=1e-9)


def equals_batch_norm_on_the_whole_batch() -> None:
    n = hvd.size()
    check([4] * n, 3, momentum=0.1, affine=True)
    check([2 + 3 * rank for rank in range(n)], 2, 3, 5, momentum=None, affine=True)
    check([0 if rank == n - 1 and n > 1 else 3 for rank in range(n)], 2, momentum=0.3, affine=False)


def gradients_of_halves_are_added_in_float32() -> None:
    for rows, dtype in ((70_000, torch.half), (257, torch.bfloat16)):
        layer = hvd.SyncBatchNorm(1)
        output = layer(torch.randn(rows, 1).to(dtype))
        assert output.dtype == dtype
        output.sum().backward()
        assert grad_of(layer.bias).item() == rows


def evaluation_is_local() -> None:
    layer = hvd.SyncBatchNorm(2, track_running_stats=False).eval()
    plain = torch.nn.BatchNorm1d(2, track_running_stats=False).eval()
    if hvd.rank() == 0:  # the others do not take part
        x = torch.randn(3, 2)
        assert torch.equal(layer(x), plain(x))
    hvd.barrier()


def a_filler_is_told_unless_it_does_not_count() -> None:
    samples, n = 2 * hvd.size() - 1, hvd.size()  # the last batch leaves out one rank
    rows = torch.randn(samples, 2, 3, generator=torch.Generator().manual_seed(3)).double()
    for tells in (False, True):
        ours, theirs = hvd.SyncBatchNorm(2).double(), torch.nn.BatchNorm1d(2).double()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1))
        reference = torch.optim.SGD(theirs.parameters(), lr=0.1)
        mine, whole = GlobalBatchSampler(samples, n), GlobalBatchSampler(samples, n, 0, 0, 1)
        for own, count, every in zip(mine, mine.counts, whole, strict=True):
            optimizer.sample_weight, ours.counts = count, count > 0 or tells
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                (ours(rows[own]) - 1).square().mean().backward()
            told = ["filler of" in str(each.message) for each in caught]
            assert told == [True] * (tells and not count)
            (theirs(rows[every]) - 1).square().mean().backward()
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
        for name, expected in theirs.state_dict().items():
            assert tells or torch.allclose(ours.state_dict()[name].double(), expected.double())


def a_channel_of_one_value_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        hvd.SyncBatchNorm(2)(torch.randn(1 if hvd.rank() == 0 else 0, 2))
