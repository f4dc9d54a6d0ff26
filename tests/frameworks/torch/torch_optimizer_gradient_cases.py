"""Where gradients lie and how they travel: buckets, types, engine memory, sparse ones."""

import gc
import math
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from itertools import product
from typing import Any

import torch
import torch_training as training
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_training import refused

import hvdtrain.torch as hvd
from hvdtrain.core.compression import Compressor
from hvdtrain.core.exchanges.half import HalfExchange
from hvdtrain.core.gradients.exchange import AllreduceExchange
from hvdtrain.types import ReduceOp


class Backwards(torch.nn.Module):
    """Uses its layers in another order than it defines them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.last = torch.nn.Linear(6, 2, dtype=torch.float64)
        self.first = torch.nn.Linear(4, 5, dtype=torch.float64)
        self.middle = torch.nn.Linear(5, 6, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(inputs)).tanh())


def plans_follow_the_order_in_which_gradients_come() -> None:
    for set_to_none in (True, False):
        model = Backwards()
        optimizer = training.wrapped_sgd(
            *model.parameters(), named_parameters=model.named_parameters()
        )
        for step in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            model(training.drawn(step, 12, 4)).square().mean().backward()
            optimizer.step()
        plan = training.plan_of(optimizer)
        names = [plan.specs[i].name for b in plan.buckets for i in b.parameters]
        layers = [name.split(".")[0] for name in names]
        assert layers == [*["last"] * 2, *["middle"] * 2, *["first"] * 2], names


def buckets_are_as_set_or_as_measured() -> None:
    plan = training.plan_of(training.together(training.momentum)[1])
    assert {other.digest for other in hvd.allgather_object(plan)} == {plan.digest}
    if given := os.environ.get("HVDTRAIN_BUCKET_BYTES"):
        assert plan.bucket_bytes == int(given)
    else:
        assert plan.bucket_bytes in (25 << 20, *(1 << power for power in range(20, 27)))


class OutOfMemoryOnce(Compressor):
    """Halves gradients before the reduction; refuses one of the last rank, the first time."""

    refused = False

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
        if hvd.rank() == hvd.size() - 1 and not cls.refused:
            cls.refused = True
            raise MemoryError("no room for a gradient")
        return tensor / 2, 2

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor * ctx


def a_gradient_that_finds_no_room_is_taken_at_the_step() -> None:
    OutOfMemoryOnce.refused = False
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    sgd = torch.optim.SGD([weight], lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, compression=OutOfMemoryOnce)
    with suppress(MemoryError):
        (weight.sum() * (hvd.rank() + 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if hvd.rank() == 0:
        (weight.sum() * hvd.size()).backward()
    optimizer.step()
    assert weight.tolist() == [-(hvd.size() + 1) / 2 - 1] * 2


def groups_of_gradients() -> None:
    # The last: where ranks give different groups, those of rank 0 count.
    for number in (0, 3, 1 + 2 * hvd.rank()):
        model = training.build()
        parameters = list(model.parameters())
        groups = number or [parameters[:2], parameters[3:5]]
        training.train_together(
            model, hvd.DistributedOptimizer(training.momentum(parameters), groups=groups), 2
        )
        training.check_equals_alone(model, training.momentum, 2)


def gradients_lie_in_engine_memory() -> None:
    forwards: list[Callable[[training.Model, torch.Tensor], torch.Tensor]] = [
        training.Model.__call__
    ]
    forwards += [partial(checkpointed, reentrant=reentrant) for reentrant in (True, False)]
    if hvd.size() == 2:  # takes seconds, and does not depend on the number of ranks
        forwards.append(partial(compiled, backend="aot_eager"))
    for number, forward in enumerate(forwards):
        model, optimizer = training.together(training.momentum)
        unused = torch.nn.Parameter(torch.zeros(2))
        optimizer.add_param_group({"params": [unused]})
        for step in range(3):
            optimizer.zero_grad(set_to_none=(number + step) % 2 == 0)
            inputs, labels = map(training.own, training.batch(step))
            optimizer.sample_weight = len(inputs)
            F.cross_entropy(forward(model, inputs), labels).backward()
            assert training.lie_in_engine_memory(optimizer, model.parameters()), (number, step)
            optimizer.step()
            assert unused.grad is None
        training.check_equals_alone(model, training.momentum, 3)


def gradients_of_equal_size_stay_with_their_optimizers() -> None:
    """Once passes have come in the same order a few times, no gradient is copied."""
    gc.collect()  # garbage of other cases holds gradients: torch 2.15 has more of it
    # Which optimizer each layer has, and which layers are trained in turn, as in adversarial nets.
    for owners, turns in (("AAABBB", "*"), ("ABABAB", "*"), ("ABCCAB", "*"), ("AAABBB", "B*")):
        layers = [(torch.nn.Linear(128, 128, bias=False), owner) for owner in owners]
        optimizers = {
            name: hvd.DistributedOptimizer(
                torch.optim.SGD([layer.weight for layer, owner in layers if owner == name])
            )
            for name in sorted(set(owners))
        }
        for step in range(8):
            turn, value = turns[step % len(turns)], torch.full((2, 128), 1.0 + hvd.rank())
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            for layer, owner in layers:
                value = layer(value) if turn in ("*", owner) else value
            value.sum().backward()
            for layer, owner in layers:
                gradients = optimizers[owner]._exchanged.gradients
                assert gradients is not None
                staying = gradients.buckets.staying
                if staying is not None and step > 5 and layer.weight.grad is not None:
                    address = layer.weight.grad.data_ptr()
                    assert staying.arena.offset(address) is not None, (owners, turns, step)
            for optimizer in optimizers.values():
                optimizer.step()


def checkpointed(model: training.Model, inputs: torch.Tensor, reentrant: bool) -> torch.Tensor:
    inputs.requires_grad_()  # without it the older form has nothing to differentiate
    result: torch.Tensor = checkpoint(model, inputs, use_reentrant=reentrant)
    return result


def compiled(model: training.Model, inputs: torch.Tensor, backend: str) -> torch.Tensor:
    result: torch.Tensor = torch.compile(model, backend=backend)(inputs)
    return result


def gradients_come_back_to_engine_memory() -> None:
    """A gradient that a script has put in the place of ours is taken, and then is ours again."""
    (weight,) = training.zeros(1, 3)
    optimizer, mean = (
        training.wrapped_sgd(weight, backward_passes_per_step=2),
        training.mean_of_ranks(),
    )
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        (weight * (hvd.rank() + 1)).sum().backward()
        weight.grad = training.grad_of(weight) + 1  # between two passes that add up
        (weight * (hvd.rank() + 1)).sum().backward()
        assert training.lie_in_engine_memory(optimizer, [weight])
        assert weight.grad.tolist() == [2 * mean + 1] * 3
        weight.grad = weight.grad / 2  # what clipping may do
        optimizer.step()
        assert weight.tolist() == [-(mean + 0.5) * (step + 1)] * 3


def gradients_with_a_graph_that_equal_their_last_summand() -> None:
    """All passes count, and backward() averages: zeros, NaN and tiny numbers are gradients, too."""
    first = hvd.rank() == 0  # a loss scaler meets numbers that are not finite on one rank alone
    nan = math.nan if first else 1.0
    for other, factors in (
        (torch.ones(0), (0.0, 1.0)),
        (torch.ones(3), (0.0, 1.0)),
        (torch.ones(3), (nan, nan)),
        (torch.ones(3), (1e-30, 1.0)),
    ):
        weights = [torch.nn.Parameter(torch.ones(())), torch.nn.Parameter(other)]
        plain = torch.optim.SGD(weights, lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, backward_passes_per_step=2)
        for factor in factors:
            loss = weights[0].square() * (hvd.rank() + 1) + factor * weights[1].sum()
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # of the cycle
                loss.backward(create_graph=True)
        assert weights[0].grad is not None
        assert weights[0].grad.item() == 2 * (hvd.size() + 1)
        optimizer.step()
        optimizer.zero_grad()


def sparse_gradients_outside_a_process_set_are_made_dense() -> None:
    if hvd.size() < 2 or not hvd.mpi_threads_supported():  # which process sets need
        return
    members = hvd.add_process_set([0])
    for sharded in (False, True):
        table = torch.nn.Embedding(6, 2, sparse=True).double()
        adam = torch.optim.Adam(table.parameters())  # takes no sparse gradients
        optimizer = hvd.DistributedOptimizer(
            adam, process_set=members, sparse_as_dense=not sharded, sharded=sharded
        )
        table(torch.tensor([1, 5])).sum().backward()
        assert optimizer.clip_grad_norm_(1.0) == 2.0
        optimizer.step()
    del optimizer
    hvd.remove_process_set(members)


def part_of_loss(kind: str, weight: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a term whose gradient for a [4, 2] weight is of this kind; none with kind "none"."""
    rows, dense = torch.tensor([rank, 3, 3]), 10 * (weight * (rank + 1)).sum()
    sparse = torch.nn.functional.embedding(rows, weight, sparse=True).sum()
    return {
        "sparse": sparse,
        "dense": dense,
        "both": sparse + dense,
        "elements": weight.gather(0, torch.tensor([[rank, 3]]), sparse_grad=True).sum(),
        "none": torch.zeros([], dtype=torch.float64, requires_grad=True),
    }[kind]


def dense_gradient(kind: str, rank: int) -> torch.Tensor:
    weight = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)
    part_of_loss(kind, weight, rank).backward()
    return torch.zeros_like(weight) if weight.grad is None else weight.grad.to_dense()


def layouts_that_differ_between_ranks() -> None:
    kinds = ("sparse", "dense", "both", "elements", "none")
    every_option: list[dict[str, Any]] = [
        *({}, {"sparse_as_dense": True}, {"sharded": True}, {"op": hvd.Sum}),
        *({"exchange": "half"}, {"backward_passes_per_step": 2}),
    ]
    for options in every_option:
        weight = torch.nn.Parameter(torch.zeros(4, 2, dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), **options)
        for first, others in product(kinds, kinds):
            of_ranks = [first, *[others] * (hvd.size() - 1)]
            passes = options.get("backward_passes_per_step", 1)
            for _ in range(passes):
                part_of_loss(of_ranks[hvd.rank()], weight, hvd.rank()).backward()
            before = weight.detach().clone()
            optimizer.step()
            optimizer.zero_grad()
            divisor = 1 if options.get("op") is hvd.Sum else hvd.size()
            total = sum(dense_gradient(kind, rank) for rank, kind in enumerate(of_ranks))
            want = before - total * passes / divisor
            assert torch.allclose(weight, want, atol=1e-12), (options, of_ranks, weight, want)


def sparse_gradients_are_weighted_by_samples() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 2, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    samples = [float(rank == 0) or 3.0 for rank in range(hvd.size())]
    for kind in ("sparse", "both"):
        kinds = ["sparse", *[kind] * (hvd.size() - 1)]
        parts = [dense_gradient(kinds[rank], rank) * samples[rank] for rank in range(hvd.size())]
        if hvd.rank():  # the first rank counts as 1
            optimizer.sample_weight = samples[hvd.rank()]
        part_of_loss(kinds[hvd.rank()], weight, hvd.rank()).backward()
        before = weight.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.allclose(weight, before - sum(parts) / sum(samples))


def sparse_gradients_are_summed_as_dense_ones_are() -> None:
    for exchange in (AllreduceExchange(ReduceOp.SUM), HalfExchange(op=ReduceOp.SUM)):
        table = torch.nn.Embedding(6, 2, sparse=True, dtype=torch.float64)
        scale = torch.nn.Parameter(torch.ones([], dtype=torch.float64))
        torch.nn.init.ones_(table.weight)
        optimizer = training.wrapped_sgd(table.weight, scale, exchange=exchange)
        message = refused(ValueError, partial(setattr, optimizer, "sample_weight", 1))
        assert "counts all ranks alike" in message
        (table(torch.tensor([5])).sum() * scale).backward()
        optimizer.step()
        assert table.weight[5].tolist() == [1.0 - hvd.size()] * 2
        assert float(scale) == 1.0 - 2 * hvd.size()


def sparse_gradients_for_an_optimizer_that_takes_no_others() -> None:
    def table() -> torch.nn.Embedding:
        torch.manual_seed(0)
        return torch.nn.Embedding(6, 2, sparse=True, dtype=torch.float64)

    def adam(of: torch.nn.Embedding) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(list(of.parameters()), lr=0.1)

    for sparse_as_dense in (False, True):
        ours, alone = table(), table()
        reference = adam(alone)
        optimizer = hvd.DistributedOptimizer(
            adam(ours), ours.named_parameters(), op=hvd.Sum, sparse_as_dense=sparse_as_dense
        )
        for step in range(3):  # row 4 is never used; row `step` is, by all ranks
            optimizer.zero_grad()
            reference.zero_grad()
            (ours(torch.tensor([hvd.rank(), step])) * (hvd.rank() + 1)).sum().backward()
            for rank in range(hvd.size()):
                (alone(torch.tensor([rank, step])) * (rank + 1)).sum().backward()
            optimizer.step()
            reference.step()
        assert training.difference(ours, alone) < 1e-14
        assert torch.equal(ours.weight[4], table().weight[4])


def gradients_whose_memory_the_program_moves() -> None:
    for late in (False, True):
        used, other = (torch.nn.Parameter(torch.zeros(8, dtype=torch.float64)) for _ in range(2))
        model = torch.nn.ParameterList([used, other])
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
        )
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            if not late:
                model.share_memory()  # gradients, too
            sum(p.sum() for p in model if p is used or not late).mul(hvd.rank() + 1).backward()
            staying = training.gradients_of(optimizer).buckets.staying
            stays = (
                staying is not None
                and staying.arena.offset(training.grad_of(used).data_ptr()) is not None
            )
            if late:  # the bucket is not reduced before step() flushes it
                model.share_memory()
            if late and stays:
                given = refused(RuntimeError, optimizer.step)
                assert "was moved to other memory between backward() and step()" in given
                break
            optimizer.step()
            mean = torch.full_like(used, (hvd.size() + 1) / 2)
            for parameter in (used, used if late else other):
                assert torch.equal(training.grad_of(parameter), mean)
                assert torch.equal(parameter.detach(), -mean * (step + 1))


def changes_before_an_average_are_told() -> None:
    weights = training.zeros(3, 2)  # of all ranks, of rank 0, of none
    optimizer = training.wrapped_sgd(*weights)
    for step, early in enumerate((False, True, True)):
        optimizer.zero_grad()
        torch.stack([*weights[: 2 if hvd.rank() == 0 else 1]]).sum().backward()
        if not early:
            optimizer.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.nn.utils.clip_grad_norm_(weights, 0.1)
            with nullcontext() if early else optimizer.skip_synchronize():
                optimizer.step()
        told = [
            text for each in caught if "had not averaged that of" in (text := str(each.message))
        ]
        assert len(told) == (step == 1 and hvd.size() > 1), told  # once
