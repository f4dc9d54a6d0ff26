"""Operations in different orders, process sets, join, and what Horovod has beside the basics."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from job import RESULTS
from torch_training import grad_of, gradients_of, ranks_sum, refused, wrapped_sgd, zeros

import hvdtrain.torch as hvd
from hvdtrain.core import context
from hvdtrain.core.gradients.exchange import AllreduceExchange, FilledBucket

TIMES = count()


def sets_that_overlap() -> None:
    """Each rank submits operations that others lack: those in common run first, and twice alike."""
    size, rank = hvd.size(), hvd.rank()
    own, every = range(rank, rank + 20), range(size + 19)
    for op in (hvd.Sum, hvd.Average, hvd.Sum):
        tensors = {n: torch.full((7,), n + rank) for n in every}

        def submit(n: int, tensors: dict[int, torch.Tensor] = tensors, op: Any = op) -> Any:
            return hvd.allreduce_async(tensors[n], name=f"overlap {n}", op=op)

        handles = {number: submit(number) for number in own}
        part = size if op is hvd.Average else 1
        sums = {n: torch.full((7,), (size * n + size * (size - 1) // 2) // part) for n in every}
        for number in range(size - 1, 20):
            assert torch.equal(hvd.synchronize(handles[number]), sums[number])
        handles |= {number: submit(number) for number in every if number not in own}
        for number, handle in handles.items():
            assert torch.equal(hvd.synchronize(handle), sums[number])


def waiting_in_different_orders() -> None:
    names = ("a", "b", "", "") if hvd.rank() % 2 else ("b", "a", "", "")
    handles = [hvd.allreduce_async(torch.ones(2), name=name, op=hvd.Sum) for name in names]
    for handle in (*handles[::-1], handles[0]):
        assert hvd.synchronize(handle).tolist() == [hvd.size()] * 2
    assert hvd.poll(handles[0])
    assert hvd.synchronize(None) is None
    no_handle: Any = torch.ones(1)
    assert "ending in _async" in refused(TypeError, partial(hvd.poll, no_handle))


def new_file(name: str) -> Path:
    return Path(os.environ[RESULTS]) / f"{name} {next(TIMES)}"


def wait_for(files: list[Path]) -> None:
    while not all(file.exists() for file in files):
        time.sleep(0.01)


def returns_while_the_peer_is_absent() -> None:
    r, returned = hvd.rank(), [new_file(f"returned.{rank}") for rank in range(hvd.size())]
    if r == 0:
        wait_for(returned[1:])
    handle = hvd.broadcast_async(torch.tensor([r]), 0, name="late")
    if r != 0:
        assert not hvd.poll(handle)
        returned[r].touch()
    assert hvd.synchronize(handle).item() == 0


def a_name_used_twice() -> None:
    if hvd.size() == 1:
        return
    if hvd.rank() != 0:  # rank 0 submits it when all have been refused
        handle = hvd.allreduce_async(torch.ones(1), name="twice")
        again = partial(hvd.allreduce_async, torch.ones(1), name="twice")
        assert "an operation of this name is still pending" in refused(ValueError, again)
    hvd.barrier()
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="twice")
    assert hvd.synchronize(handle).item() == 1


def every_reduction() -> None:
    n, r = hvd.size(), hvd.rank()
    tensor = torch.tensor([r + 1.0, n - r])
    assert hvd.allreduce(tensor, op=hvd.Min).tolist() == [1, 1]
    assert hvd.allreduce(tensor, op=hvd.Max).tolist() == [n, n]
    four = (4, 4.0)[hvd.rank() % 2]  # the same number
    scaled = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=0.5, postscale_factor=four)
    assert scaled.tolist() == [2 * ranks_sum()] * 2
    assert hvd.allreduce(torch.tensor([3]), op=hvd.Sum, prescale_factor=0.5).item() == n
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
        result = hvd.allreduce(torch.full((3,), r + 1, dtype=dtype), op=hvd.Sum)
        assert (result.dtype, result.tolist()) == (dtype, [ranks_sum()] * 3)
    flags = torch.tensor([r == 0, True, False])
    for op, first in ((hvd.Sum, True), (hvd.Average, n == 1), (hvd.Product, n == 1)):
        assert hvd.allreduce(flags, op=op).tolist() == [first, True, False]


def in_place_and_grouped() -> None:
    n, r = hvd.size(), hvd.rank()
    tensor = torch.arange(6.0).reshape(2, 3).t() * (r + 1)
    expected = torch.arange(6.0).reshape(2, 3).t() * ranks_sum()
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
    assert torch.equal(tensor, expected)
    group = [torch.ones(2) * (r + 1), torch.ones(3, dtype=torch.float64) * (r + 1)]
    totals = [[ranks_sum()] * 2, [ranks_sum()] * 3]
    assert [t.tolist() for t in hvd.grouped_allreduce(group, op=hvd.Sum)] == totals
    handle = hvd.grouped_allreduce_async_(group, op=hvd.Sum, name="group")
    assert [a is b for a, b in zip(hvd.synchronize(handle), group, strict=True)] == [True, True]
    assert [t.tolist() for t in group] == totals
    gathered = hvd.grouped_allgather([torch.tensor([r]), torch.ones(r, 2)])
    assert gathered[0].tolist() == list(range(n))
    assert gathered[1].shape == (ranks_sum() - n, 2)
    ones = [torch.ones(n)]
    starts = (hvd.grouped_allreduce_async, hvd.grouped_allgather_async)
    of_tuples = [hvd.synchronize(start(ones)) for start in starts]
    of_tuples += [hvd.synchronize(hvd.grouped_reducescatter_async(ones))]
    of_tuples += [hvd.grouped_allreduce_([torch.ones(2)]), hvd.grouped_allgather(ones)]
    assert all(type(result) is tuple for result in of_tuples)
    of_lists = hvd.grouped_allreduce(ones), hvd.grouped_reducescatter(ones)
    assert all(type(result) is list for result in of_lists)


def alltoall() -> None:
    n, r = hvd.size(), hvd.rank()
    even = hvd.alltoall(torch.arange(n * 2).reshape(n, 2) + 100 * r)
    assert even.tolist() == [[2 * r + 100 * k, 2 * r + 1 + 100 * k] for k in range(n)]
    splits = torch.arange(n, dtype=torch.int32)
    rows, received = hvd.alltoall(torch.full((int(splits.sum()),), r), splits)
    assert received.dtype == torch.int32
    assert received.tolist() == [r] * n
    assert rows.tolist() == [k for k in range(n) for _ in range(r)]
    rest = torch.full((n + 2,), r + 1.0, requires_grad=True)
    rows, received = hvd.alltoall(rest, [1] * n)
    (rows * (r + 1)).sum().backward()
    assert rows.tolist() == [k + 1.0 for k in range(n)]
    assert grad_of(rest).tolist() == [*(k + 1.0 for k in range(n)), 0, 0]  # two rows went nowhere
    equal = hvd.alltoall(torch.arange(n) + 10 * r, torch.tensor([], dtype=torch.int32))
    assert [part.tolist() for part in equal] == [[10 * k + r for k in range(n)], [1] * n]
    if n > 1:
        assert "is not divisible" in refused(ValueError, partial(hvd.alltoall, torch.ones(n + 1)))
    bad = partial(hvd.alltoall, torch.ones(n), torch.tensor([n] + [1] * (n - 1)))
    assert n == 1 or "splits must be" in refused(ValueError, bad)


def reducescatter() -> None:
    n, r = hvd.size(), hvd.rank()
    mine = hvd.reducescatter(torch.arange(2 * n + 1.0).reshape(-1, 1) * (r + 1), op=hvd.Sum)
    start = r * 2 + min(r, 1)
    expected = torch.arange(2 * n + 1.0)[start : start + 2 + (r == 0)] * ranks_sum()
    assert mine.flatten().tolist() == expected.tolist()
    few = hvd.reducescatter(torch.ones(1, 4, dtype=torch.int32), op=None)
    assert few.shape == ((1 if r == 0 else 0), 4)
    halves = hvd.grouped_reducescatter([torch.ones(n).half(), torch.ones(n)], op=hvd.Average)
    assert [t.tolist() for t in halves] == [[1.0], [1.0]]
    assert halves[0].dtype == torch.float16


def sparse() -> None:
    n, r = hvd.size(), hvd.rank()
    places, values = torch.tensor([[0, r + 1]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    mine = torch.sparse_coo_tensor(places, values, (n + 1, 2), check_invariants=True)
    dense = hvd.sparse_allreduce_async(mine, name="sparse", op=hvd.Average)().to_dense()
    assert torch.allclose(dense[0], torch.tensor([1.0, 2.0]))
    assert torch.allclose(dense[1:], torch.tensor([3.0, 4.0]).expand(n, 2) / n)


def a_script_makes_its_tensors_elsewhere() -> None:
    """Where torch makes tensors by default says nothing about where ours are."""
    n, r = hvd.size(), hvd.rank()
    one, table = torch.ones(2), torch.nn.Embedding(n + 1, 2, sparse=True)
    here, own_row = one.device, torch.tensor([r])
    norm, inputs = hvd.SyncBatchNorm(2), torch.arange(8.0).reshape(4, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*table.parameters()], lr=1.0))
    others = hvd.DistributedOptimizer(torch.optim.SGD(norm.parameters(), lr=1.0))
    before = table.weight.detach().clone()
    with torch.device("meta"):
        assert hvd.allreduce(one.half(), op=hvd.Sum).tolist() == [float(n)] * 2
        gathered = hvd.allgather(one.requires_grad_())
        gathered.sum().backward()
        assert hvd.alltoall(one.repeat(n)).tolist() == [1.0] * 2 * n
        for _ in range(2):
            if r != 1:  # this rank has no row
                table(own_row).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            norm(inputs).sum().backward()
            others.step()
            others.zero_grad()
    assert {gathered.device, table.weight.device, norm.weight.device} == {here}
    users = [rank for rank in range(n) if rank != 1]
    assert torch.allclose((before - table.weight)[users], torch.full((2,), 2 / n))


def adasum() -> None:
    n, r = hvd.size(), hvd.rank()
    orthogonal = torch.zeros(n)
    orthogonal[r] = 2.0
    assert hvd.allreduce(orthogonal, op=hvd.Adasum).tolist() == [2.0] * n
    same = torch.tensor([1.0, -3.0])
    assert torch.allclose(hvd.allreduce(same, op=hvd.Adasum), same)


def compression() -> None:
    third = torch.tensor([1 / 3])
    for kind, dtype in ((hvd.Compression.fp16, torch.half), (hvd.Compression.bf16, torch.bfloat16)):
        result = hvd.allreduce(third, compression=kind)
        assert result.dtype == torch.float32
        assert torch.allclose(result, third.to(dtype).float(), rtol=1e-2)
        assert not torch.equal(result, third)


def process_sets() -> None:
    n, r = hvd.size(), hvd.rank()
    if n < 3:
        return
    even = hvd.add_process_set(range(0, n, 2))
    low = hvd.add_process_set(hvd.ProcessSet([0, 1]))
    assert even.included() == (r % 2 == 0)
    # Overlapping sets, in different orders.
    mine = [each for each in ([even, low] if r == 0 else [low, even]) if each.included()]
    one = torch.tensor([float(r)])
    handles = [hvd.allreduce_async(one, op=hvd.Sum, process_set=each) for each in mine]
    sums = {even.process_set_id: sum(range(0, n, 2)), low.process_set_id: 1}
    for each, handle in zip(mine, handles, strict=True):
        assert hvd.synchronize(handle).item() == sums[each.process_set_id]
    if low.included():
        assert low.rank() == r
        assert hvd.broadcast(torch.tensor([r]), 1, process_set=low).item() == 1
        assert hvd.allgather(torch.tensor([r]), process_set=low).tolist() == [0, 1]
    else:
        for call in (partial(hvd.allreduce, torch.ones(1), process_set=low), low.rank):
            assert "does not belong to the process set" in refused(ValueError, call)
    assert "registered already" in refused(ValueError, partial(hvd.add_process_set, [0, 1]))
    for nonsense in (None, 0, ["a"]):
        assert "list of ranks" in refused(ValueError, partial(hvd.ProcessSet, nonsense))
    assert hvd.remove_process_set(low)
    assert (low.size(), low.rank(), low.process_set_id) == (None, None, None)
    assert not hvd.remove_process_set(low)
    assert hvd.remove_process_set(even)


def join_with_uneven_data() -> None:
    n, r = hvd.size(), hvd.rank()
    for step in range(3 * (r + 1)):
        for name in ("step", None):  # again and again, so that both are known
            total = hvd.allreduce(torch.ones(2), op=hvd.Sum, name=name)
            assert total.tolist() == [n - step // 3] * 2, (step, total)
    assert hvd.join() == n - 1
    if n > 1:
        if r == 0:
            last = hvd.join()
        else:
            refused_here = partial(hvd.allgather, torch.ones(1), "impossible")
            assert "rank 0 joined" in refused(hvd.HorovodInternalError, refused_here)
            last = hvd.join()
        assert last > 0
    last = max(0, n - 2)
    if r == last:  # the others have joined before, else this would wait for them
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="of the last").item() == 1
    assert hvd.join() == last
    if r == 0:
        assert hvd.allreduce(torch.ones(2) * 5, op=hvd.Min).tolist() == [5.0 if n == 1 else 0.0] * 2
    hvd.join()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == n  # a name of its own numbering


def repeated_operations_of_a_process_set_that_is_made_again() -> None:
    n = hvd.size()
    if n == 1:
        return
    members = list(range(0, n, 2))
    for _ in range(2):
        process_set = hvd.add_process_set(members)
        for number in range(4):
            tensor = torch.full((3,), float(hvd.rank() + number))
            if process_set.included():
                total = hvd.allreduce(tensor, op=hvd.Sum, name="of a set", process_set=process_set)
                assert total.tolist() == [sum(members) + number * len(members)] * 3
            total = hvd.allreduce(tensor, op=hvd.Sum, name="of a set")
            assert total.tolist() == [n * number + ranks_sum() - n] * 3
        assert hvd.remove_process_set(process_set)
        if process_set.included():
            gone = partial(hvd.allreduce, tensor, name="of a set", process_set=process_set)
            assert "is not registered" in refused(ValueError, gone)


def shapes_and_types_at_the_edges() -> None:
    n, r = hvd.size(), hvd.rank()
    assert hvd.reducescatter(torch.zeros(n, 0), op=hvd.Sum).shape == (1, 0)
    rows, splits = hvd.synchronize(hvd.alltoall_async(torch.full((n,), float(r))))
    assert rows.tolist() == [float(k) for k in range(n)]
    assert splits.tolist() == [1] * n
    refused(ValueError, lambda: hvd.allreduce(torch.ones(2) > 0, prescale_factor=0.5))
    if n > 1:
        op = hvd.Average if r == 0 else hvd.Product
        refused(hvd.HorovodInternalError, lambda: hvd.allreduce(torch.ones(2) > 0, op=op, name="b"))
    lazy = torch.tensor([complex(1, 2 + r)]).conj()
    hvd.broadcast_(lazy, root_rank=0)
    assert lazy.resolve_conj().tolist() == [complex(1, -2)]


def reduced_buckets(optimizer: hvd.DistributedOptimizer) -> int:
    number: int = gradients_of(optimizer).buckets.step.progress.reduced
    return number


def two_buckets(process_set: hvd.ProcessSet) -> tuple[list[torch.nn.Parameter], Any]:
    weights = zeros(2, 2, dtype=torch.float32)
    return weights, wrapped_sgd(*weights, groups=2, process_set=process_set)


def backward_waits_for_results_that_others_have_already() -> None:
    """Others are blocked in another operation before rank 0 notices that a bucket is done."""
    if hvd.size() == 1 or not hvd.mpi_threads_supported():
        return
    for late in (0, 1):  # the number of a bucket; the others fill none after it
        _waits_for_results_of(late)


def _waits_for_results_of(late: int) -> None:
    weights, optimizer = two_buckets(hvd.global_process_set)
    queue, told, returned = context.current().world.queue, threading.Event(), threading.Event()
    call_listeners, reduce = queue.call_listeners, AllreduceExchange.reduce

    def told_listeners(ranks: Sequence[int]) -> None:
        call_listeners(ranks)
        told.set()

    def late_reduce(self: AllreduceExchange, bucket: FilledBucket, *others: Any) -> None:
        reduce(self, bucket, *others)
        if hvd.rank() == 0 and bucket.number == late:
            told.wait(300)
            returned.wait(0.3)  # which must not happen

    with (
        patch.object(AllreduceExchange, "reduce", late_reduce),
        patch.object(queue, "call_listeners", told_listeners),
    ):
        used = weights if hvd.rank() == 0 else weights[1 - late :]  # buckets are filled backward
        (torch.cat([*used]).sum() * (hvd.rank() + 1)).backward()
        reduced = reduced_buckets(optimizer)
        returned.set()
        hvd.allreduce(torch.ones(1), name="after backward")
    assert reduced == late + 1
    optimizer.step()
    torch.testing.assert_close(weights[1].detach(), torch.full((2,), -(hvd.size() + 1) / 2))


def backward_goes_on_waiting_while_only_ranks_outside_its_process_set_are_blocked() -> None:
    n, r = hvd.size(), hvd.rank()
    if n < 3:
        return
    hvd.shutdown()
    hvd.init()  # with no other channel, in which ranks may wait for each other
    pair, told = hvd.add_process_set([0, 1]), new_file("told")
    queue, calls = context.current().world.queue, count(1)
    call_listeners = queue.call_listeners

    def told_listeners(ranks: Sequence[int]) -> None:
        call_listeners(ranks)
        if next(calls) == 2:  # again, which a rank that has come out of backward() is not
            told.touch()

    start = partial(hvd.allreduce_async, torch.ones(1), name="which others wait for")
    if r < 2:
        weights, optimizer = two_buckets(pair)
        if r == 1:
            # A rank of the set takes part in the rounds of the world while it computes.
            handle = start()
            hook = weights[0].register_hook(lambda _: wait_for([told]))
            ((weights[0] * 0).sum() + weights[1].sum()).backward()
            hook.remove()
        else:
            with patch.object(queue, "call_listeners", told_listeners):
                (weights[0] + weights[1]).sum().backward()
            reduced = reduced_buckets(optimizer)
            told.touch()
        optimizer.step()
    if r != 1:
        handle = start()
    handle.wait()
    hvd.remove_process_set(pair)
    assert r or reduced == 2


def backward_returns_where_a_rank_outside_its_process_set_delays_a_member() -> None:
    """Rank 1 waits for rank 2, in a process set without rank 0, and rank 2 for rank 0."""
    n, r = hvd.size(), hvd.rank()
    if n < 3:
        return
    sets = [hvd.add_process_set(members) for members in ([0, 1], [1, 2], [0, 2])]
    waits = [partial(hvd.allreduce, torch.ones(1), process_set=one) for one in sets]
    if r < 2:
        weights, optimizer = two_buckets(sets[0])
        if r == 1:
            waits[1]()
        (weights[0] + weights[1]).sum().backward()
        if r == 0:
            waits[2]()
        optimizer.step()
        assert weights[0].tolist() == [-1.0, -1.0]
    elif r == 2:
        waits[2]()
        waits[1]()
    for process_set in sets:
        hvd.remove_process_set(process_set)


def backward_waits_for_no_bucket_that_another_rank_fills_only_later() -> None:
    """Rank 1 fills the second bucket in step(), when rank 0 has come out of backward()."""
    n = hvd.size()
    if n == 1 or not hvd.mpi_threads_supported():
        return
    (weights, optimizer), over = two_buckets(hvd.global_process_set), new_file("over")
    (weights[1] if hvd.rank() == 1 else weights[0] + weights[1]).sum().backward()
    assert grad_of(weights[1]).tolist() == [1.0, 1.0]
    if hvd.rank() == 0:
        over.touch()
    wait_for([over])
    optimizer.step()
    assert torch.allclose(weights[0], torch.full((2,), -(n - 1) / n))


def a_backward_that_a_signal_ends_leaves_no_thread_and_no_wait_behind() -> None:
    class Alarm(Exception):
        pass

    def ring(*_: object) -> None:
        raise Alarm

    if hvd.size() == 1:
        return
    blocked, program = context.current().blocked, threading.get_ident()

    def ring_soon() -> None:
        while (since := blocked.since) is None or time.perf_counter() - since < 0.1:
            time.sleep(0.01)
        signal.pthread_kill(program, signal.SIGALRM)

    (weight,), rung = zeros(1, 1), new_file("rung")
    optimizer = wrapped_sgd(weight)
    before = signal.signal(signal.SIGALRM, ring)
    if hvd.rank() == 0:  # which waits for the others in backward() until it hears the alarm
        caller = threading.Thread(target=ring_soon, daemon=True)
        caller.start()
        with contextlib.suppress(Alarm):
            weight.sum().backward()
        caller.join()
        rung.touch()
    else:
        wait_for([rung])
        weight.sum().backward()
    signal.signal(signal.SIGALRM, before)
    optimizer.step()
    assert weight.item() == -1
    optimizer.zero_grad()
    hvd.shutdown()
    for thread in threading.enumerate():
        if thread.name == "hvdtrain-channel":
            thread.join(60)
            assert not thread.is_alive()
    for call in (weight.sum().backward, optimizer.step):  # neither waits for ever
        assert "shut down" in refused(hvd.HorovodInternalError, call)
    hvd.init()


def join_in_the_middle_of_a_step() -> None:
    n, r = hvd.size(), hvd.rank()
    used, unused = weights = zeros(2, 2)
    optimizer = wrapped_sgd(*weights, op=hvd.Sum, groups=[[used], [unused]])
    for step in range(3):
        optimizer.zero_grad()
        if r == 0 and step < 2:
            used.sum().backward()
            if step == 1:  # without step(), as where a loss scaler skips it
                hvd.join()
                continue
        else:
            (used + unused).sum().backward()
        optimizer.step()
        of_both = [n, n] if step == 2 else [n, n - 1] if n > 1 else [1]
        assert [w.grad[0].item() for w in weights if w.grad is not None] == of_both
        if step == 1:
            hvd.join()


def a_joined_rank_applies_the_factors_of_the_others() -> None:
    n, r = hvd.size(), hvd.rank()
    count = 100_000  # beyond what ranks of a node add each for itself
    there, total = r < n - 1 or n == 1, sum(range(1, max(n, 2)))
    if there:
        value = torch.full((count,), r + 1.0)
        half = hvd.allreduce(value, op=hvd.Sum, name="scaled", postscale_factor=0.5)
        assert torch.equal(half, torch.full((count,), total / 2))
    hvd.join()
    (weight,) = zeros(1, count, dtype=torch.float32)
    for predivide in (1.0, 4.0):
        optimizer = wrapped_sgd(weight, gradient_predivide_factor=predivide)
        optimizer.zero_grad()
        if there:
            (weight * (r + 1.0)).sum().backward()
            optimizer.synchronize()
            # The plain average is over all ranks, the joined one included.
            assert torch.allclose(grad_of(weight), torch.full((count,), total / n)), predivide
        hvd.join()


def gradients_outlive_their_optimizer() -> None:
    (weight,) = zeros(1, 300_000, dtype=torch.float32)
    for round_number in range(3):
        optimizer = wrapped_sgd(weight)
        (weight * 2.0).sum().backward()
        optimizer.step()
        kept = grad_of(weight)
        del optimizer
        optimizer = wrapped_sgd(weight)
        assert torch.equal(kept, torch.full_like(kept, 2.0)), round_number
        optimizer.zero_grad()
