"""What a program does with gradients beside reducing them: hooks, other types, early changes."""

import re
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import DEFAULT, patch

import torch
import torch_training as training
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import hvdtrain.torch as hvd
from hvdtrain.errors import MismatchError
from hvdtrain.streams import HOST

ROOT = Path(__file__).resolve().parents[3]
# Decorators, whose functions call the decorated ones.
DECORATORS = {"hvdtrain/core/tuning", "hvdtrain/torch/operations/dynamo"}


def scaled_late(parameter: torch.Tensor) -> None:
    time.sleep(0.02)
    training.grad_of(parameter).mul_(hvd.rank() + 1)


def on_tensor(parameter: torch.nn.Parameter) -> object:
    return parameter.register_post_accumulate_grad_hook(scaled_late)


def on_node(parameter: torch.nn.Parameter) -> object:
    node = get_gradient_edge(parameter).node
    node.register_hook(lambda *_: scaled_late(parameter))
    return node  # which somebody must keep


def hooks_of_the_users_come_first() -> None:
    mean = training.mean_of_ranks()
    orders: list[tuple[Callable[[torch.nn.Parameter], object], bool]]
    orders = [(on_tensor, False), (on_tensor, True), (on_node, False)]
    for hook, wrapped_first in orders:
        weights = training.zeros(2, 2)
        kept = [] if wrapped_first else [hook(weight) for weight in weights]
        optimizer = training.wrapped_sgd(*weights)
        kept += [hook(weight) for weight in weights] if wrapped_first else []
        for _ in range(2):
            optimizer.zero_grad()
            (weights[0] + weights[1]).sum().backward()
            for weight in weights:
                assert training.grad_of(weight).tolist() == [mean] * 2, (hook, wrapped_first)
            assert training.lie_in_engine_memory(optimizer, weights)
            optimizer.step()
        assert weights[1].tolist() == [-2 * mean] * 2


def gradients_whose_data_is_replaced() -> None:
    """As old scripts do to clip them."""
    used, elsewhere = weights = training.zeros(2, 2)
    optimizer = training.wrapped_sgd(*weights)
    for factor, set_to_none in ((1, True), (2, False), (4, True), (8, True)):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = used.sum() * (hvd.rank() + 1) * factor
        if hvd.rank() == 0:
            loss = loss + elsewhere.sum() * hvd.size() * factor
        loss.backward()
        optimizer.synchronize()
        for weight in weights:
            training.grad_of(weight).data = training.grad_of(weight).data / 2
        with optimizer.skip_synchronize():
            optimizer.step()
    assert used.tolist() == [-training.mean_of_ranks() * 15 / 2] * 2
    assert elsewhere.tolist() == [-15 / 2] * 2


def parameters_that_change_their_type() -> None:
    for set_to_none in (True, False):
        model, alone = training.build().float(), training.build()
        optimizer = hvd.DistributedOptimizer(
            training.momentum(list(model.parameters())), model.named_parameters()
        )
        reference = training.momentum(list(alone.parameters()))
        for number in range(2):
            if number == 0:
                model.double()
            else:
                model.float().double()  # nothing but the nodes is another
                if set_to_none:  # else torch itself warns of the gradient that is there
                    weight = model.get_parameter("3.weight")
                    weight.data = weight.data.t().contiguous().t()
            model.load_state_dict(alone.state_dict())
            training.train_together(model, optimizer, 2, 0.05, set_to_none)
            training.train_alone(alone, reference, 2, 0.05)
            assert training.difference(model, alone) < 1e-13, number
            assert training.lie_in_engine_memory(optimizer, model.parameters())
        specs = training.plan_of(optimizer).specs
        assert {spec.kind for spec in specs} == {"float64"}
        assert specs[2].strides == ((1, 20) if set_to_none else (48, 1))


def a_type_that_changes_without_a_backward_pass() -> None:
    (weight,) = training.zeros(1, 2, dtype=torch.float32)
    optimizer = training.wrapped_sgd(weight)
    weight.data = weight.data.double()
    if hvd.rank() == hvd.size() - 1:
        (weight * (1 / 3)).sum().backward()
    optimizer.step()
    assert abs(float(weight.detach()[0]) + 1 / 3 / hvd.size()) < 1e-15


def a_type_that_changes_on_one_rank() -> None:
    if hvd.size() == 1:
        return
    (weight,) = training.zeros(1, 2, dtype=torch.float32)
    optimizer = training.wrapped_sgd(weight, named_parameters=[("weight", weight)])
    if hvd.rank() == 1:
        weight.data = weight.data.double()
    message = training.refused(MismatchError, lambda: (weight.sum().backward(), optimizer.step()))
    assert "rank 1 sent" in message
    assert "'weight' from torch.float32 to torch.float64" in message


def gradients_changed_before_they_are_reduced() -> None:
    if not hvd.mpi_threads_supported() or hvd.size() == 1:
        return  # backward() then waits in MPI itself, which nothing calls back
    parameters = training.zeros(2, 2)
    optimizer = training.wrapped_sgd(*parameters)
    last = hvd.rank() == hvd.size() - 1
    for step, change in enumerate((False, True, True)):
        optimizer.zero_grad()
        if last:
            hvd.allreduce(torch.zeros(1), name="elsewhere")
        for weight in parameters:
            (weight.sum() * (hvd.rank() + 1)).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if not last:
                reduced = training.gradients_of(optimizer).buckets._views
                for index, weight in enumerate(parameters):
                    assert training.grad_of(weight).data_ptr() != reduced[index].data_ptr()
                    if change:
                        training.grad_of(weight).zero_()
                hvd.allreduce(torch.zeros(1), name="elsewhere")
            optimizer.step()
        assert len(caught) == (not last and step == 1), caught
        assert all("synchronize() before changing gradients" in str(w.message) for w in caught)
        for weight in parameters:
            assert weight.tolist() == [-training.mean_of_ranks() * (step + 1)] * 2
        assert training.lie_in_engine_memory(optimizer, parameters)


def steps_in_the_hooks_of_gradients() -> None:
    for wrapped_first in (True, False):
        weights = training.zeros(2, 3)
        wrapped: dict[torch.Tensor, hvd.DistributedOptimizer] = {}

        def update(weight: torch.Tensor, wrapped: dict[Any, Any] = wrapped) -> None:
            wrapped[weight].step()
            wrapped[weight].zero_grad()

        for hooked in (not wrapped_first, wrapped_first):
            for weight in weights:
                if hooked:
                    weight.register_post_accumulate_grad_hook(update)
                else:
                    wrapped[weight] = training.wrapped_sgd(weight)
        for step in range(4):
            (weights[0] + weights[1]).sum().mul(hvd.rank() + 1).backward()
            assert [w.tolist() for w in weights] == [
                [-training.mean_of_ranks() * (step + 1)] * 3
            ] * 2


class TwoSteps(torch.optim.SGD):
    """SGD on gradients elsewhere, as sharpness-aware minimization takes them."""

    @torch.no_grad()
    def first_step(self) -> None:
        for weight in self.param_groups[0]["params"]:
            if weight.grad is not None:
                self.state[weight]["old"] = weight.clone()
                weight.add_(weight.grad)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for weight in self.param_groups[0]["params"]:
            if weight.grad is not None:
                weight.copy_(self.state[weight]["old"])
        self.step()
        self.zero_grad()


def methods_of_the_wrapped_optimizer_find_reduced_gradients() -> None:
    used, unused = weights = training.zeros(2, 2)
    with torch.no_grad():
        used.fill_(1.0)
    optimizer = hvd.DistributedOptimizer(TwoSteps(weights, lr=0.1))
    mean, expected = training.mean_of_ranks(), 1.0
    for _ in range(3):
        for step in (optimizer.first_step, optimizer.second_step):
            (used.square().sum() * (hvd.rank() + 1)).backward()
            step()
        expected -= 0.1 * 2 * mean * (expected + 2 * mean * expected)
        assert torch.allclose(used, torch.full((2,), expected).double(), rtol=1e-12)
    assert not unused.any()


def gradients_dropped_while_others_are_missing() -> None:
    def remove(weights: list[torch.nn.Parameter]) -> None:
        for weight in weights:
            weight.grad = None

    for drop in (
        remove,
        lambda weights: [w.grad.zero_() for w in weights if w.grad is not None],
        lambda weights: torch.optim.SGD(weights, lr=1.0).zero_grad(),
    ):
        weights = training.zeros(3, 2)
        optimizer = training.wrapped_sgd(*weights)
        for step in range(3):
            for factor in (5, 1):
                ((weights[0] + weights[1]).sum() * (hvd.rank() + 1) * factor).backward()
                if factor == 5:
                    drop(weights)
            optimizer.step()
            optimizer.zero_grad()
            moved = -training.mean_of_ranks() * (step + 1)
            assert [w.tolist() for w in weights] == [[moved] * 2] * 2 + [[0.0] * 2]
        loss = (weights[0] + weights[1]).sum()
        loss.backward(retain_graph=True)
        torch.nn.init.ones_(weights[0])
        drop(weights)
        assert "two backward passes, as SAM" in training.refused(RuntimeError, loss.backward)


def passes_that_add_up_are_counted() -> None:
    (weight,) = training.zeros(1, 2)
    optimizer = training.wrapped_sgd(weight, backward_passes_per_step=2)
    for factor in (5, 1, 1):
        (weight.sum() * (hvd.rank() + 1) * factor).backward()
        if factor == 5:
            weight.grad = None
    optimizer.step()
    assert weight.tolist() == [-2 * training.mean_of_ranks()] * 2
    optimizer.zero_grad()
    for _ in range(2):
        weight.sum().backward()
    weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    message = training.refused(RuntimeError, lambda: weight.sum().backward())
    assert "more than backward_passes_per_step=2 times before step()" in message


def reentrant_checkpoints_of_a_layer_used_twice() -> None:
    layer = torch.nn.Linear(2, 2).double()
    optimizer = training.wrapped_sgd(*layer.parameters())
    inputs = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    once = checkpoint(layer, inputs, use_reentrant=True)
    loss = checkpoint(layer, once, use_reentrant=True).sum()
    assert "pass use_reentrant=False" in training.refused(RuntimeError, loss.backward)
    optimizer.zero_grad()


def reentrant_checkpoints_of_other_layers_on_each_rank() -> None:
    """The outer pass ends, not each checkpoint's, when the program clips averages of all ranks."""
    for groups in (1, 10):
        models = []
        for _ in range(2):
            torch.manual_seed(1)
            models.append(training.Model(*(torch.nn.Linear(3, 3) for _ in range(5))).double())
        ours, alone = models
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(ours.parameters(), lr=0.1), ours.named_parameters(), groups=groups
        )
        reference = torch.optim.SGD(alone.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            reference.zero_grad()
            value = rows = training.drawn(step, hvd.size(), 3)
            value = value[hvd.rank() :][:1].requires_grad_()
            for number, layer in enumerate(ours):
                wraps = number % (hvd.rank() + 1) == 0  # all on rank 0, every second one on rank 1
                value = checkpoint(layer, value, use_reentrant=True) if wraps else layer(value)
            value.square().sum().backward()
            alone(rows).square().sum().div(hvd.size()).backward()
            assert training.gradients_of(optimizer).buckets.step.progress.passes == 1
            for model in (ours, alone):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            reference.step()
        assert training.difference(ours, alone) < 1e-13


class BackwardInForward(torch.autograd.Function):
    """Computes a loss and the gradients of a layer at once, as losses that save memory do."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
        with torch.enable_grad():
            loss = layer(rows).sum()
            loss.backward()
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> None:
        return None


def gradients_that_a_forward_pass_computes() -> None:
    layer = torch.nn.Linear(3, 2)
    optimizer = training.wrapped_sgd(*layer.parameters())
    BackwardInForward.apply(torch.full((1, 3), hvd.rank() + 1.0), layer)
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[training.mean_of_ranks()] * 3] * 2
    optimizer.step()


def steps_in_hooks_while_gradients_arrive_that_ranks_share() -> None:
    if hvd.size() == 1:
        return
    weights = training.zeros(2, 2)
    optimizer = training.wrapped_sgd(*weights, sharded=True)
    arrived: list[torch.Tensor] = []

    def step_on_both(weight: torch.Tensor) -> None:
        arrived.append(weight)
        if len(arrived) == 2:
            optimizer.step()

    for weight in weights:
        weight.register_post_accumulate_grad_hook(step_on_both)
    message = training.refused(RuntimeError, (weights[0] + weights[1]).sum().backward)
    assert "before backward() had ended" in message
    optimizer.zero_grad()


def buckets_go_together_at_the_end_of_a_pass() -> None:
    weights = training.zeros(3, 2)
    optimizer = training.wrapped_sgd(*weights, groups=[[weight] for weight in weights])
    buckets = training.gradients_of(optimizer).buckets
    seen: list[int] = []
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda _: seen.append(buckets.step.launched))

    def launched(together: bool, count: int = 3) -> list[int]:
        """Return how many buckets are launched as each of the first gradients arrives."""
        optimizer.zero_grad()
        seen.clear()
        buckets.together = together
        used = [weights[i] for bucket in buckets.plan.buckets for i in bucket.parameters][:count]
        (torch.stack(used).sum() * (hvd.rank() + 1)).backward()
        for weight in used if buckets.channel.has_thread or count == 3 else ():
            assert training.grad_of(weight).tolist() == [training.mean_of_ranks()] * 2
        optimizer.step()
        return [*seen]

    launched(False)  # the plan follows the order in which they arrive
    early = launched(False)
    assert early == [0, 1, 2]
    assert [launched(True), launched(True, count=2)] == [[0, 0, 0], [0, 0]]


def a_gradient_takes_the_walk_of_the_page() -> None:
    weights = training.zeros(2, 2)
    optimizer = training.wrapped_sgd(*weights)
    buckets = training.gradients_of(optimizer).buckets
    if any(buckets.placed):  # gradients stay where autograd has made them
        return
    channel, walked = buckets.channel, set[str]()

    def note(module: str, given: object, *_: object) -> object:
        engine = module.startswith("hvdtrain.engines.")
        if not engine or any(given is buffer for buffer in buckets.buffers):
            frame: FrameType | None = sys._getframe()
            walked.add(module)
            while frame is not None:
                walked.add(frame.f_globals["__name__"])
                frame = frame.f_back
        return DEFAULT

    with ExitStack() as spies:
        spied = ((HOST, "fill"), (channel.queue, "add"), (channel.communicator, "allreduce"))
        for owner, name in spied:
            effect, own = partial(note, type(owner).__module__), getattr(owner, name)
            spies.enter_context(patch.object(owner, name, wraps=own, side_effect=effect))
        (weights[0] + weights[1]).sum().backward()
    optimizer.step()
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = page.partition("\n## A gradient\n")[2].partition("\nFor Keras")[0]
    described = set(re.findall(r"`(hvdtrain/[\w/]+)\.py`", section))
    assert len(described) == 12
    taken = {module.replace(".", "/") for module in walked if module.startswith("hvdtrain.")}
    files = [{each for each in some if "/engines/" not in each} for some in (taken, described)]
    assert files[0] - DECORATORS == files[1], files
