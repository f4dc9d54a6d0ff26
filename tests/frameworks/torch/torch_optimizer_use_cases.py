"""How people use DistributedOptimizer: loops, closures, schedulers, parameters that come and go."""

import copy
import pickle
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch_training import (
    batch,
    build,
    check_equals_alone,
    drawn,
    mean_of_ranks,
    momentum,
    own,
    plan_of,
    ranks_sum,
    refused,
    together,
    train_together,
    warned,
    wrapped_sgd,
    zeros,
)

import hvdtrain.torch as hvd
from hvdtrain.core import context
from hvdtrain.errors import MismatchError


def a_weight_set_after_backward_is_refused() -> None:
    """Unless it changes nothing; the weight of the next step may come before zero_grad()."""
    for sharded in (False, True):
        (weight,) = zeros(1, 1)
        optimizer = wrapped_sgd(weight, sharded=sharded)
        for step, finish in enumerate((optimizer.step, optimizer.synchronize)):
            (weight * (8.0 if hvd.rank() else 0.5)).sum().backward()
            optimizer.sample_weight = 3.0 + step
            message = refused(RuntimeError, finish)
            assert f"sample_weight was set to {3.0 + step} after gradients of this step" in message
            optimizer.zero_grad()
            assert not weight.any()
        for tokens in ((1, 3, 2, 1), (3, 1, 5, 2)):
            optimizer.sample_weight = own_tokens = tokens[hvd.rank()]
            optimizer.zero_grad()
            before = float(weight)
            (weight * (8.0 if hvd.rank() else 0.5)).sum().backward()
            optimizer.sample_weight = own_tokens
            optimizer.step()
            rest = sum(tokens[1 : hvd.size()])
            mean = (0.5 * tokens[0] + 8 * rest) / (tokens[0] + rest)
            assert abs(before - mean - float(weight)) < 1e-14


def two_backwards_without_a_step() -> None:
    model, optimizer = together(momentum)
    loss = model(own(batch(0)[0])).sum()
    loss.backward(retain_graph=True)
    message = refused(RuntimeError, loss.backward)
    assert "more than backward_passes_per_step=1 times before step()" in message
    optimizer.zero_grad()


def a_step_that_only_the_last_rank_skips() -> None:
    """Known to the others when they take the next one, or to this rank when they have left."""
    if hvd.size() == 1:
        return
    last = hvd.size() - 1
    for skip in ("zero_grad", "None", "no step"):
        (weight,) = zeros(1, 3)
        optimizer = wrapped_sgd(weight)

        def train(o: Any = optimizer, w: Any = weight, skip: str = skip) -> None:
            for step in range(3):
                o.zero_grad()
                w.sum().backward()
                skips = step == 1 and hvd.rank() == last
                if skips and skip == "zero_grad":
                    o.zero_grad()
                if skips and skip == "None":
                    w.grad = None
                if not skips or skip != "no step":
                    o.step()

        message = refused(MismatchError, train)
        assert f"A step is missing on rank {last}: gradients were discarded there" in message


def synchronize_then_step() -> None:
    model, optimizer = together(momentum)
    inputs, labels = map(own, batch(0))
    optimizer.sample_weight = len(inputs)
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.synchronize()
    text = warned(UserWarning, optimizer.step)
    assert "optimizer.step() called without optimizer.skip_synchronize()" in text
    check_equals_alone(model, momentum, 1)


def a_closure_drops_gradients_of_another_sample_weight() -> None:
    _step_after_a_skipped_one((torch.optim.SGD, False), (torch.optim.SGD, True))


def a_closure_of_a_foreign_optimizer_drops_gradients_of_another_sample_weight() -> None:
    _step_after_a_skipped_one((Halving, False))


def _step_after_a_skipped_one(*kinds: tuple[Any, bool]) -> None:
    """Only the weight of rank 0 changes."""
    n, r = hvd.size(), hvd.rank()
    for kind, sharded in kinds:
        (weight,) = zeros(1, 1)
        optimizer = hvd.DistributedOptimizer(kind([weight], lr=1.0), sharded=sharded)

        def closure(o: Any = optimizer, w: torch.Tensor = weight) -> torch.Tensor:
            o.zero_grad()
            loss = (w * (r + 1.0)).sum()
            loss.backward()
            return loss

        optimizer.sample_weight = 1
        closure()
        optimizer.sample_weight = 1 if r else 2
        optimizer.step(closure)
        mean = (1 + n * (n + 1) / 2) / (n + 1)
        assert abs(float(weight) + mean) < 1e-14


class Halving(torch.optim.SGD):
    """Halves its rate where the loss is larger than 1: the closure's loss decides."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.param_groups[0]["lr"] /= 2 if float(loss) > 1 else 1
        super().step()
        return loss


def bucket_sizes_of_a_process_set_are_those_of_its_first_rank() -> None:
    """As where a launcher has not forwarded the variable; the set leaves no channel behind."""
    if hvd.size() < 3:
        return
    here, (weight,), pair = context.current(), zeros(1, 1), hvd.add_process_set([0, 2])
    config, channels = here.config, len(here.channels())
    if hvd.rank() == 0:
        here.config = replace(config, bucket_bytes=8, first_bucket_bytes=8)
    optimizer = wrapped_sgd(weight, process_set=pair)
    here.config = config
    if pair.included():
        plan = plan_of(optimizer)
        assert (plan.bucket_bytes, plan.first_bucket_bytes) == (8, 8)
    (weight * float(hvd.rank())).sum().backward()
    optimizer.step()
    is_member = pair.included()
    assert weight.item() == (-1.0 if is_member else -float(hvd.rank()))
    assert len(here.channels()) == channels + is_member
    del optimizer
    hvd.remove_process_set(pair)
    assert len(here.channels()) == channels - is_member


def closures_on_data_that_differ_between_ranks() -> None:
    n, r = hvd.size(), hvd.rank()
    inputs = drawn(3, 4 * n, 3)
    targets = inputs.sum(1, keepdim=True) + 1
    targets[rows_of(n - 1)] *= 50  # so that a rank alone would search elsewhere

    def trained(make: Any, op: Any, rows: slice) -> list[Any]:
        layer = torch.nn.Linear(3, 1, dtype=torch.float64)
        for parameter in layer.parameters():
            torch.nn.init.zeros_(parameter)
        optimizer = make(layer.parameters())
        if rows != slice(None):
            optimizer = hvd.DistributedOptimizer(optimizer, op=op)
        reduction = "mean" if op is hvd.Average else "sum"

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(layer(inputs[rows]), targets[rows], reduction=reduction)
            loss.backward()
            return loss

        losses = [float(optimizer.step(closure)) for _ in range(3)]
        return [*layer.weight.detach().flatten().tolist(), *losses]

    kinds: list[Any] = [
        partial(torch.optim.LBFGS, max_iter=6),
        partial(torch.optim.LBFGS, max_iter=6, line_search_fn="strong_wolfe"),
        partial(Halving, lr=0.01),
    ]
    for make, op in product(kinds, (hvd.Average, hvd.Sum)):
        found = trained(make, op, rows_of(r))
        np.testing.assert_allclose(found, trained(make, op, slice(None)), rtol=1e-6, atol=1e-6)
        assert all(each == found for each in hvd.allgather_object(found))


def rows_of(rank: int) -> slice:
    return slice(4 * rank, 4 * rank + 4)


def a_closure_gives_its_own_loss_where_nothing_depends_on_it() -> None:
    (weight,) = zeros(1, 1)
    every_loss: list[Any] = [
        *(lambda r: torch.tensor(r + 1.0), lambda r: r + 1.0, lambda r: 3.0 if r == 0 else None)
    ]
    for kind_of, losses in product((torch.optim.SGD, Halving), every_loss):
        optimizer = hvd.DistributedOptimizer(kind_of([weight], lr=0.1))

        def closure(o: Any = optimizer, losses: Any = losses) -> Any:
            o.zero_grad()
            weight.sum().backward()
            return losses(hvd.rank())

        got, local = optimizer.step(closure), losses(hvd.rank())
        if kind_of is torch.optim.SGD:
            assert got is local or got == local
        else:
            kind = float if local is None else type(local)
            mean = 3.0 if losses(1) is None else mean_of_ranks()
            assert (type(got), float(got)) == (kind, mean)


def passes_for_the_class_that_it_wraps() -> None:
    _, optimizer = together(momentum)
    for kind in (hvd.DistributedOptimizer, torch.optim.SGD, torch.optim.Optimizer):
        assert isinstance(optimizer, kind)
    assert not isinstance(optimizer, torch.optim.Adam)
    assert optimizer.__class__.__name__ == "SGD"
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        assert "state_dict()" in refused(TypeError, partial(duplicate, optimizer))


def unfrozen_or_added_later() -> None:
    model = build()
    model[0].weight.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(momentum(list(model.parameters())))
    model[0].weight.requires_grad_(True)
    model(own(batch(0)[0])).sum().backward()
    assert "wrap the optimizer again" in refused(RuntimeError, optimizer.step)
    first, *others = build().parameters()
    optimizer = hvd.DistributedOptimizer(momentum([first]))
    optimizer.param_groups[0]["params"] += others
    torch.stack([parameter.sum() for parameter in (first, *others)]).sum().backward()
    assert "add_param_group()" in refused(RuntimeError, optimizer.step)
    optimizer.zero_grad()
    first.requires_grad_(False)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    first.requires_grad_(True)
    assert "add_param_group() was last called" in refused(RuntimeError, optimizer.step)


def operations_between_backward_and_step_where_ranks_use_different_parameters() -> None:
    if not hvd.mpi_threads_supported():
        return  # backward() then waits in MPI itself, which nothing calls back
    weights, size = zeros(2, 2), hvd.size()
    optimizer = wrapped_sgd(*weights)
    for step in range(3):
        optimizer.zero_grad()
        # The last rank uses but one parameter, or none in the second step.
        used = weights if hvd.rank() < size - 1 else weights[: int(step != 1)]
        for weight in used:
            (weight.sum() * (hvd.rank() + 1)).backward()
        # Before others are through their backward passes, they have to hear that it is here.
        assert float(hvd.allreduce(torch.tensor([float(step)]), op=hvd.Sum)) == step * size
        optimizer.step()
    for weight, total in zip(
        weights, (3 * ranks_sum() - size, 3 * ranks_sum() - 3 * size), strict=True
    ):
        assert torch.allclose(weight, torch.full_like(weight, -total / size))


def reduced_gradients_that_ranks_remove() -> None:
    """Where one rank alone does, its weights are others from then on."""
    weights = zeros(3, 2)  # the last one is never used
    optimizer = wrapped_sgd(*weights)

    def train(by: set[int]) -> None:
        optimizer.zero_grad()
        (weights[0] + weights[1]).sum().backward()
        optimizer.synchronize()
        if hvd.rank() in by:
            weights[1].grad = None
        with optimizer.skip_synchronize():
            optimizer.step()

    for by in ({*range(hvd.size())}, set(), {0}):
        train(by)
    if hvd.size() == 1:
        train(set())
        return
    message = refused(MismatchError, partial(train, set()))
    assert message.count("without the averages of") == 1, message


def two_optimizers_in_another_order_on_each_rank() -> None:
    if not hvd.mpi_threads_supported():
        return  # backward() then waits in MPI itself, which nothing calls back
    pairs = [together(momentum), together(momentum)]
    for step in range(2):
        inputs, labels = map(own, batch(step))
        mine = pairs if hvd.rank() % 2 else pairs[::-1]
        for model, optimizer in mine:
            optimizer.sample_weight = len(inputs)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
        for _, optimizer in reversed(mine):
            optimizer.step()
    for model, _ in pairs:
        check_equals_alone(model, momentum, 2)


def a_later_optimizer_takes_parameters_over() -> None:
    """While it exists; the program may still have the one before, whose steps are refused."""
    every_option: list[dict[str, Any]] = [
        *({"op": hvd.Sum}, {"op": hvd.Sum, "sharded": True}, {"exchange": "local:steps=2"})
    ]
    for options in every_option:
        named = dict(zip("abc", zeros(3, 3), strict=True))

        def wrap(names: str, named: Any = named, options: Any = options) -> Any:
            return wrapped_sgd(
                *(named[name] for name in names), named_parameters=named.items(), **options
            )

        def train(optimizer: Any, named: Any = named) -> None:
            for _ in range(2):
                optimizer.zero_grad()
                (sum(named.values()).sum() * (hvd.rank() + 1)).backward()
                optimizer.step()

        total = -2 * ranks_sum() / (1 if "op" in options else hvd.size())
        first = wrap("ab")
        train(first)
        second, third = wrap("bc"), wrap("ac")
        train(third)
        found = [float(parameter.detach()[0]) for parameter in named.values()]
        assert np.allclose(found, [2 * total, total, total], rtol=1e-14), (options, found)
        for call in (first.step, *([first.synchronize] if "op" in options else [])):
            assert "was given to another DistributedOptimizer" in refused(RuntimeError, call)
        assert "parameter 'c' was given" in refused(RuntimeError, second.step)
        del third
        assert "parameter 'b' was given" in refused(RuntimeError, first.step)
        del second
        for parameter in named.values():
            parameter.grad = None
        train(first)
        assert abs(float(named["a"].detach()[0]) - 3 * total) < 1e-14


def bad_arguments() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    sgd = torch.optim.SGD([weight], lr=1.0)
    wrap = hvd.DistributedOptimizer
    assert "without a name" in refused(ValueError, partial(wrap, sgd, []))
    twice = [("a", weight), ("a", torch.nn.Parameter(torch.zeros(1)))]
    assert "names used twice: a" in refused(ValueError, partial(wrap, sgd, twice))
    assert "already" in refused(ValueError, partial(wrap, wrap(sgd)))
    wrong: Any = 3
    assert "got int" in refused(TypeError, partial(wrap, wrong))
    assert "op must be" in refused(ValueError, partial(wrap, sgd, op=hvd.Max))
    for wrong in (0, -1, "ab", ([weight],), [["weight"]], [[weight], [weight]]):
        assert "groups" in refused(ValueError, partial(wrap, sgd, groups=wrong))
    assert "use groups" in warned(DeprecationWarning, partial(wrap, sgd, num_groups=1))
    refused(AssertionError, wrap(sgd, op=hvd.Adasum).skip_synchronize().__enter__)
    optimizer = wrap(sgd)
    for weight_of_rank in (-1.0, float("nan"), float("inf")):
        message = refused(ValueError, partial(setattr, optimizer, "sample_weight", weight_of_rank))
        assert "sample_weight must be a finite number >= 0" in message


def no_samples_is_no_end() -> None:
    model, optimizer = together(momentum)
    optimizer.sample_weight = 0
    assert "no rank has samples" in refused(ValueError, optimizer.step)
    train_together(model, optimizer, 2)
    check_equals_alone(model, momentum, 2)


def a_model_that_differs() -> None:
    if hvd.size() == 1:
        return
    model = torch.nn.Linear(3, 5 if hvd.rank() == 1 else 4)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    wrap = partial(hvd.DistributedOptimizer, sgd, model.named_parameters())
    message = refused(MismatchError, wrap)
    assert f"[rank 1/{hvd.size()}] DistributedOptimizer: parameter 'weight'" in message
    assert "shape (5, 3), but rank 0 has (4, 3)" in message


def inference_mode_is_named() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    with torch.inference_mode():
        made_there = torch.nn.Parameter(torch.zeros(2))
        sgd = torch.optim.SGD([weight], lr=1.0)
        message = refused(RuntimeError, partial(hvd.DistributedOptimizer, sgd))
    assert "outside torch.inference_mode()" in message
    sgd = torch.optim.SGD([made_there], lr=1.0)
    message = refused(RuntimeError, partial(hvd.DistributedOptimizer, sgd, [("w", made_there)]))
    assert "'w' was created in torch.inference_mode()" in message
