"""What is left unfinished on each rank, of steps and operations, at the end of the job, too."""

import os
import sys
import time
import warnings

import torch
from all_cases import cases_of
from ranks import report
from torch_training import mean_of_ranks, refused, wrapped_sgd, zeros

import hvdtrain.torch as hvd
from hvdtrain.core import context
from hvdtrain.errors import HvdtrainError

# What still polls a channel that is gone fails within this time; 0 where another launch waits.
POLLING_SECONDS = float(os.environ.get("POLLING_SECONDS", "0"))


def wrapped() -> tuple[torch.nn.Parameter, hvd.DistributedOptimizer]:
    """Return a weight, and an optimizer that takes its gradient away from it."""
    (weight,) = zeros(1, 3)
    return weight, wrapped_sgd(weight)


def train(weight: torch.nn.Parameter, optimizer: hvd.DistributedOptimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (weight * (hvd.rank() + 1)).sum().backward()
        optimizer.step()


def a_backward_pass_that_nobody_steps() -> None:
    weight, optimizer = wrapped()
    if hvd.rank() == 0 and hvd.mpi_threads_supported():
        weight.sum().backward()
    weight.grad = None
    del optimizer
    optimizer = wrapped_sgd(weight)
    until = time.monotonic() + POLLING_SECONDS  # of the first plan's channel
    steps = 0
    while hvd.allreduce(torch.tensor(float(time.monotonic() < until)), op=hvd.Min, name="go on"):
        train(weight, optimizer, 5)
        steps += 5
    assert weight.tolist() == [-mean_of_ranks() * steps] * 3
    optimizer.zero_grad()


def operations_that_are_pending_at_shutdown() -> None:
    values = [torch.ones(4) for _ in range(3)]
    handles = [hvd.allreduce_async_(values[0], name="of all", op=hvd.Sum)]
    if hvd.rank() == 0:
        handles.append(hvd.allreduce_async_(values[1], name="of rank 0"))
    weight, optimizer = wrapped()
    if hvd.rank() == hvd.size() - 1 and hvd.size() > 1 and hvd.mpi_threads_supported():
        hvd.broadcast_async_(values[2], 0, name="of the last rank")
    size = hvd.size()
    hvd.shutdown()
    time.sleep(POLLING_SECONDS / 3)
    assert hvd.synchronize(handles[0]).tolist() == [float(size)] * 4
    if size > 1 and len(handles) > 1:
        assert "of rank 0" in refused(HvdtrainError, lambda: hvd.synchronize(handles[1]))
    del optimizer
    hvd.init()
    assert hvd.size() == size
    weight, optimizer = wrapped()
    train(weight, optimizer, 3)
    assert weight.tolist() == [-mean_of_ranks() * 3] * 3
    assert hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum, name="of rank 0").item() == size


def a_call_that_becomes_known_while_the_job_ends() -> None:
    """As by another thread: its channel has closed, and what was known of it has gone."""
    value = torch.tensor([hvd.rank() + 1.0])

    def call() -> None:
        refused(HvdtrainError, lambda: hvd.allreduce(value, name="known", op=hvd.Sum))

    context.current().world.before_closing(call)
    hvd.shutdown()
    hvd.init()
    total = hvd.allreduce(value, name="known", op=hvd.Sum)
    assert total.item() == mean_of_ranks() * hvd.size()


def operations_that_are_pending_on_a_process_set_that_goes() -> None:
    if hvd.size() < 2 or not hvd.mpi_threads_supported():
        return
    ranks = list(range(max(hvd.size() - 1, 1)))
    some = hvd.add_process_set(ranks)
    handle = None
    if hvd.rank() == 0 and len(ranks) > 1:
        handle = hvd.allreduce_async_(torch.ones(2), name="alone", process_set=some)
    assert hvd.remove_process_set(some)
    if handle is not None:
        assert "alone" in refused(HvdtrainError, lambda: hvd.synchronize(handle))
    again = hvd.add_process_set(ranks)
    if again.included():
        summed = hvd.allreduce(torch.ones(2), name="alone", op=hvd.Sum, process_set=again)
        assert summed.tolist() == [float(len(ranks))] * 2
    hvd.remove_process_set(again)


def an_operation_that_a_rank_leaves_behind_when_it_joins() -> None:
    for _ in range(2):
        value = torch.full((2,), 2.0)
        handle = None
        if hvd.rank() == 0:
            handle = hvd.allreduce_async_(value, name="left behind", op=hvd.Sum)
        hvd.join()
        assert hvd.synchronize(handle) is (value if hvd.rank() == 0 else None)
        assert value.tolist() == [2.0] * 2


def a_rank_that_leaves_while_others_wait_and_goes_on() -> None:
    if hvd.size() < 2:
        return
    # Rank 2 would ask in vain alone if it was still listening, in the wait of an earlier step.
    hvd.barrier()
    leaves = hvd.shutdown if hvd.rank() == 0 else lambda: hvd.allreduce(torch.ones(1), name="vain")
    assert "rank 0 left the job while others were in allreduce 'vain'" in refused(
        HvdtrainError, leaves
    )
    train(*wrapped(), steps=1)
    hvd.shutdown()
    hvd.init()


def ranks_that_have_taken_other_numbers_of_steps() -> None:
    if hvd.size() < 2 or not hvd.mpi_threads_supported():
        return
    weight, optimizer = wrapped()
    weight.sum().backward()
    if hvd.rank() == 0:
        optimizer.zero_grad()  # which drops what the others step
        assert "step 0" in refused(HvdtrainError, weight.sum().backward)
    else:
        optimizer.step()
        assert "step 1" in refused(HvdtrainError, weight.sum().backward)
    del optimizer
    weight, optimizer = wrapped()
    train(weight, optimizer, 1)
    assert weight.tolist() == [-mean_of_ranks()] * 3


def shared() -> tuple[torch.nn.Parameter, hvd.DistributedOptimizer]:
    weight = torch.nn.Parameter(torch.zeros(200))
    sgd = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    return weight, hvd.DistributedOptimizer(sgd, sharded=True)


def after(steps: int) -> list[float]:
    moved = sum((1 - 0.5**step) / 0.5 for step in range(1, steps + 1))
    return [-mean_of_ranks() * moved] * 200


def a_shared_step_that_ranks_leave_behind() -> None:
    for leaves in range(3):
        weight, optimizer = shared()
        train(weight, optimizer, 3)
        expected = after(3)
        assert weight.tolist() == expected
        if leaves == 0 and hvd.size() > 1 and hvd.mpi_threads_supported():
            ends = weight.sum().backward if hvd.rank() == 0 else hvd.shutdown
            text = refused(HvdtrainError, ends)
            assert "left the job while others were in optimizer step" in text, text
        elif leaves == 1:
            weight.sum().backward()
        hvd.shutdown()
        assert weight.tolist() == expected
        with torch.no_grad():
            weight.mul_(2.0)
        assert weight.tolist() == [2 * number for number in expected]
        hvd.init()


def a_join_beside_shared_steps() -> None:
    if hvd.size() < 2 or not hvd.mpi_threads_supported():
        return
    weight, optimizer = shared()
    train(weight, optimizer, 2)
    if hvd.rank() == 1:
        text = refused(HvdtrainError, lambda: train(weight, optimizer, 1))
        assert "rank 0 joined" in text or "ranks 0, 2 joined" in text, text
        assert "take its steps with sample_weight=0 instead of join" in text, text
    hvd.join()
    weight, optimizer = shared()
    train(weight, optimizer, 3)
    assert weight.tolist() == after(3)


def nothing_is_left() -> None:
    with warnings.catch_warnings(action="error"):
        hvd.barrier()
    for channel in context.current().channels():
        assert channel.pending() == []


if __name__ == "__main__":
    hvd.init()
    cases = cases_of(sys.modules[__name__])
    for function in cases:
        function()
    report(cases=len(cases))
    if hvd.rank() == 0:
        hvd.allreduce_async_(torch.ones(2), name="at the end")
