"""Optimizer steps whose work the ranks of a node share, against steps that each takes in full."""

import copy
import ctypes
import gc
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional as F
from torch_training import (
    Make,
    Model,
    batch,
    build,
    difference,
    drawn,
    gradients_of,
    momentum,
    own,
    refused,
    train_alone,
    train_together,
    warned,
)

import hvdtrain.torch as hvd
from hvdtrain.core.sharding.exchange import ShardedExchange
from hvdtrain.engines.communicator import Slices
from hvdtrain.errors import MismatchError
from hvdtrain.train.optimizers.layerwise import Lamb, Lars

CPU = torch.device("cpu")
MAKES: dict[str, Make] = {
    "momentum": momentum,
    "adam": partial(torch.optim.Adam, lr=0.01),
    "amsgrad": partial(torch.optim.AdamW, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adagrad": torch.optim.Adagrad,
    "lars": partial(Lars, lr=0.5),
    "lamb": partial(Lamb, lr=0.01),
}


def on_host() -> bool:
    """Return whether tensors are on the CPU, where torch's optimizers may read their counters."""
    return torch.get_default_device().type == "cpu"


def wrapped(make: Make, model: Model, **settings: Any) -> hvd.DistributedOptimizer:
    settings = {"sharded": True} | settings
    optimizer = hvd.DistributedOptimizer(
        make(list(model.parameters())), model.named_parameters(), **settings
    )
    assert optimizer.sharded == (settings["sharded"] and hvd.size() > 1)
    return optimizer


def pair(make: Make, dtype: torch.dtype = torch.float64) -> list[tuple[Model, Any]]:
    models = [build().to(dtype) for _ in range(2)]
    return [(m, wrapped(make, m, sharded=s)) for m, s in zip(models, (True, False), strict=True)]


def state_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    largest = 0.0
    for key, entry in other["state"].items():
        assert list(entry) == list(one["state"][key])
        for name, value in entry.items():
            mine = one["state"][key][name]
            assert type(mine) is type(value)
            if isinstance(value, torch.Tensor):
                assert (mine.shape, mine.dtype) == (value.shape, value.dtype)
                assert mine.stride() == value.stride()
                largest = max(largest, float((mine - value).abs().max()))
            else:
                assert mine == value
    return largest


def in_node_memory(optimizer: hvd.DistributedOptimizer) -> bool:
    exchange = gradients_of(optimizer).buckets.exchange
    return isinstance(exchange, ShardedExchange) and isinstance(exchange.slices, Slices)


def equal_on_all_ranks(model: torch.nn.Module) -> bool:
    values = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return all(values == theirs for theirs in hvd.allgather_object(values))


def _own_objects() -> dict[int, object]:
    """Return the objects of torch's part and of shared steps, but for records, by id."""
    gc.collect()
    places, records = ("hvdtrain.torch", "hvdtrain.core.sharding"), (ctypes.Structure, ctypes.Array)
    return {
        id(each): each
        for each in gc.get_objects()
        if str(type(each).__module__).startswith(places)
        and not (is_dataclass(each) or isinstance(each, (type, FunctionType, *records)))
    }


def few_objects_make_an_optimizer() -> None:
    for sharded in (True, False):
        before, model = _own_objects(), build()
        optimizer = wrapped(MAKES["adam"], model, sharded=sharded)
        train_together(model, optimizer, 3)
        made = [each for key, each in _own_objects().items() if key not in before]
        stays = gradients_of(optimizer).buckets.staying is not None
        # Of each parameter there is one of a kind where steps are not shared.
        count = len(made) - 12 if optimizer.sharded else len(set(map(type, made))) - 9
        assert count <= stays, made


def parameters_without_elements_have_a_state() -> None:
    for make in [MAKES[name] for name in ("amsgrad", *(["adagrad"] if on_host() else []))]:
        states = []
        for sharded in (True, False):
            weights = [torch.nn.Parameter(torch.ones(shape)) for shape in ((0,), (50,), (3, 0))]
            optimizer = hvd.DistributedOptimizer(make(weights), sharded=sharded)
            for _ in range(3):
                torch.cat([weight.flatten() for weight in weights]).square().sum().backward()
                if sharded:  # torch's own norm refuses those without elements
                    norm = optimizer.clip_grad_norm_(100.0, math.inf)
                    torch.testing.assert_close(norm, 2 * weights[1].detach().abs().max())
                optimizer.step()
                optimizer.zero_grad()
            states.append(optimizer.state_dict())
        assert list(states[1]["state"]) == [0, 1, 2]
        assert list(states[0]["state"]) == [0, 1, 2]
        for index in (0, 2):
            entries = [state["state"][index] for state in states]
            torch.testing.assert_close(*entries, rtol=0, atol=0)


def shared_steps_go_on_from_any_state() -> None:
    for name in ("momentum", "amsgrad", "lars", "lamb", *(["adagrad"] if on_host() else [])):
        make = MAKES[name]
        first = build()
        before = wrapped(make, first, sharded=False)
        train_together(first, before, 2)
        model = build(1)
        optimizer = wrapped(make, model)
        train_together(model, optimizer, 1)
        model.load_state_dict(first.state_dict())
        optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
        hvd.broadcast_optimizer_state(optimizer)
        train_together(model, optimizer, 2)
        last = build(2)
        after = wrapped(make, last, sharded=False)
        last.load_state_dict(model.state_dict())
        after.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train_together(last, after, 2)
        train_together(first, before, 4)
        train_together(model, optimizer, 2)
        assert difference(model, last) < 1e-13
    optimizer.load_state_dict(wrapped(momentum, build()).state_dict())
    assert optimizer.state_dict()["state"] == {}


def the_state_of_all_ranks_needs_all_of_them() -> None:
    model = build()
    optimizer = wrapped(momentum, model)
    train_together(model, optimizer, 2)
    if hvd.size() == 1 or in_node_memory(optimizer):
        return

    def ask() -> None:
        if hvd.rank() == 0:
            optimizer.state_dict()
        else:
            train_together(model, optimizer, 1)

    state = optimizer.state_dict()
    assert state_difference(optimizer.state_dict(), state) == 0.0
    optimizer.consolidate_state_dict(hvd.size() - 1)
    if hvd.rank() == hvd.size() - 1:
        assert state_difference(optimizer.state_dict(), state) == 0.0
    assert "optimizer state for all members" in refused(MismatchError, ask)


def shared_norms() -> None:
    for kind in (1.0, float("inf")):
        model, alone = build(), build()
        optimizer, reference = wrapped(momentum, model), momentum(list(alone.parameters()))
        for step in range(4):
            inputs, labels = batch(step)
            optimizer.sample_weight = len(own(inputs))
            optimizer.zero_grad()
            F.cross_entropy(model(own(inputs)), own(labels)).backward()
            norm = optimizer.clip_grad_norm_(0.05, kind)
            optimizer.step()
            reference.zero_grad()
            F.cross_entropy(alone(inputs), labels).backward()
            expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05, kind)
            reference.step()
            assert abs(float(norm) - float(expected)) < 1e-6
        assert difference(model, alone) < 1e-13


def shared_norms_of_what_is_not_finite() -> None:
    """Wherever NaN is: whether a library loses it may depend on the rank that owns the element."""
    if not on_host():
        return  # what follows reads the norm
    model = build()
    optimizer = wrapped(momentum, model)
    train_together(model, optimizer, 2)
    inputs, labels = map(own, batch(0))
    places = [(p, place) for p in model.parameters() for place in (0, -1)]
    for kind in (2.0, float("inf")):
        for parameter, place in places:
            loss = F.cross_entropy(model(inputs), labels)
            if hvd.rank() == hvd.size() - 1:
                loss = loss + parameter.flatten()[place] * float("nan")
            loss.backward()
            clip = partial(optimizer.clip_grad_norm_, 1.0, kind, error_if_nonfinite=True)
            assert "non" in refused(RuntimeError, clip) or hvd.size() > 1
            optimizer.zero_grad()


def shared_gradients_are_not_for_the_program() -> None:
    if hvd.size() == 1:
        train_together(model := build(), wrapped(momentum, model), 2, clip=0.1)
        return
    model = build()
    optimizer = wrapped(momentum, model)
    train_together(model, optimizer, 2)
    inputs, labels = map(own, batch(0))
    changes: list[Callable[[], object]] = [
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        lambda: [p.grad.mul_(2.0) for p in model[3:4].parameters() if p.grad is not None],
        lambda: setattr(model[3].bias, "grad", torch.zeros(20).double()),
    ]
    for change in changes:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        change()
        assert "ask for it after step()" in refused(RuntimeError, optimizer.state_dict)
        for call in (
            optimizer.step,
            optimizer.synchronize,
            partial(optimizer.clip_grad_norm_, 1.0),
        ):
            assert "optimizer.clip_grad_norm_()" in refused(RuntimeError, call)
        optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    train_together(model, optimizer, 1)
    backward(model, 0)
    for p in model.parameters():
        p.grad = None if p.grad is None else p.grad.detach()  # in the same memory: no change
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    hook = optimizer.register_step_pre_hook(lambda *_: None)
    F.cross_entropy(model(inputs), labels).backward()
    assert "pre-hook" in refused(ValueError, optimizer.step)
    hook.remove()
    optimizer.step()


def shared_state_outlives_the_buckets_of_another_memory_format() -> None:
    if not on_host():
        return
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 40, 3), torch.nn.Conv2d(40, 4, 3)).double()
    whole = copy.deepcopy(model)
    inputs = torch.randn(2, 3, 8, 8, dtype=torch.float64) * (hvd.rank() + 1)
    for each, sharded in ((model, True), (whole, False)):
        adam = torch.optim.Adam(each.parameters(), lr=0.01)
        one = hvd.DistributedOptimizer(adam, each.named_parameters(), sharded=sharded)
        for layout in (torch.contiguous_format, torch.channels_last):
            each.to(memory_format=layout)  # type: ignore[call-overload]  # torch's stub lacks it
            for _ in range(3):
                one.zero_grad()
                each(inputs.contiguous(memory_format=layout)).square().mean().backward()
                one.step()
    assert difference(model, whole) < 1e-12


def shared_weights_that_move() -> None:
    for name in ("adam", "lamb"):
        _weights_that_move(MAKES[name])


def _weights_that_move(make: Make) -> None:
    (model, optimizer), (whole, reference) = pair(make)
    for each, one in ((model, optimizer), (whole, reference)):
        train_together(each, one, 2)
        *_, moved, _, last, _ = each.parameters()
        moved.data = moved.data.clone() * 0.5
        with torch.no_grad():
            last.mul_(0.5)
        train_together(each, one, 2)
        each.float()
        each.double()
        train_together(each, one, 1)
        one.consolidate_state_dict()
        added = torch.nn.Parameter(torch.ones(200).double())
        one.add_param_group({"params": [added], "lr": 0.5})
        each.register_parameter("added", added)
        inputs, labels = map(own, batch(7))
        for _ in range(2):
            one.zero_grad()
            (F.cross_entropy(each(inputs), labels) + added.square().sum()).backward()
            one.step()
    assert difference(model, whole) < 1e-13
    assert state_difference(optimizer.state_dict(), reference.state_dict()) < 1e-12
    model.float()
    whole.float()
    for one in (optimizer, reference):
        one.load_state_dict(one.state_dict())  # which casts it
    for each, one in ((model, optimizer), (whole, reference)):
        one.zero_grad()
        F.cross_entropy(each(inputs.float()), labels).backward()
        one.step()
    assert difference(model, whole) < 1e-6


class Scaled(torch.optim.Optimizer):
    """Divides the gradients of its last group by their norm, which is that of all together."""

    least = 0.0  # norm that it divides by

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        last = self.param_groups[-1]["params"]
        norm = torch.nn.utils.get_total_norm([p.grad for p in last]).item()
        norm = norm if norm > self.least else 1.0
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad / (norm if group["params"] is last else 1.0)


class Counting(torch.optim.SGD):
    """Keeps the number of its steps in its groups, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


def replaced(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    vars(optimizer)["step"] = partial(type(optimizer).step, optimizer)
    return optimizer


def what_steps_on_parts_would_lose_is_told() -> None:
    for make, told in (
        (partial(Counting, lr=0.1), "step() of Counting changes 'steps', which later steps do not"),
        (lambda p: replaced(momentum(p)), "step() of this SGD was replaced, but ranks call that"),
    ):
        assert told in warned(UserWarning, partial(wrapped, make, build()))


def scheduled(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = momentum(parameters)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def what_cannot_be_shared() -> None:
    model = build(memory_format=torch.contiguous_format)
    for kind in (torch.optim.LBFGS, *([torch.optim.Adafactor] if on_host() else [])):
        wrap = partial(wrapped, partial(kind, lr=0.0), model)
        assert f"{kind.__name__} needs whole parameters" in refused(ValueError, wrap)
    groups = [{"params": [p]} for p in model.parameters()]
    together = "steps on all parameters together"
    for name, least, reason in (("Scaled", 0.0, "needs whole"), ("Lamb", 1e3, together)):
        mixed = type(name, (Scaled,), {"least": least})(groups, {"lr": 0.0})
        assert f"{name} {reason}" in refused(ValueError, lambda: wrapped(lambda _: mixed, model))  # noqa: B023
    wrap = partial(wrapped, momentum, model)
    assert "sharded=True works" in refused(ValueError, partial(wrap, op=hvd.Adasum))
    assert "sharded=True works" in refused(ValueError, partial(wrap, exchange="local_sgd"))
    optimizer = wrapped(scheduled, model)
    if hvd.size() > 1 and in_node_memory(optimizer):
        halves = [torch.nn.Parameter(part) for part in torch.zeros(4).split(2)]
        sgd = torch.optim.SGD(halves, lr=0.1)
        wrap_halves = partial(hvd.DistributedOptimizer, sgd, sharded=True)
        assert "shares its memory with a larger tensor" in refused(ValueError, wrap_halves)


class Halving(torch.optim.Optimizer):
    """An elementwise optimizer that torch does not have, with a number and a scalar as state."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["count"] = self.state[p].get("count", 0) + 1
                    self.state[p]["mean"] = (self.state[p].get("mean", p.grad) + p.grad) / 2
                    self.state[p]["rate"] = p.new_full((), group["lr"] / self.state[p]["count"])
                    p -= self.state[p]["rate"] * self.state[p]["mean"]


def an_optimizer_of_ones_own() -> None:
    for make in (Halving, *([torch.optim.RAdam] if on_host() else [])):  # it reads counters
        (model, optimizer), (whole, reference) = pair(make)
        train_together(model, optimizer, 3)
        train_together(whole, reference, 3)
        assert difference(model, whole) < 1e-15
        assert state_difference(optimizer.state_dict(), reference.state_dict()) < 1e-15
        alone = build()
        train_alone(alone, make(alone.parameters()), 3)
        assert difference(model, alone) < 1e-13


def backward(model: Model, step: int) -> None:
    inputs, labels = map(own, batch(step))
    F.cross_entropy(model(inputs.to(next(model.parameters()).dtype)), labels).backward()


def a_shared_norm_where_types_have_other_owners() -> None:
    """The kernel of shared steps takes no halves, which are too few for every rank to own some."""
    if hvd.local_size() != hvd.size():  # halves are added in float32 between nodes, and refused
        return
    if not on_host() or not in_node_memory(wrapped(momentum, build())):
        return
    for fused, width in ((None, 48), (True, 8)):  # torch's fused form is wrong for more halves
        torch.manual_seed(7)
        linear, norm = torch.nn.Linear(96, 96), torch.nn.LayerNorm(width).bfloat16()
        model = torch.nn.ModuleList([linear, norm])
        whole = copy.deepcopy(model)
        inputs = drawn(hvd.rank(), 2, 96)
        norms = []
        for each, sharded in ((model, True), (whole, False)):
            sgd = torch.optim.SGD(each.parameters(), lr=0.5, fused=fused)
            one = hvd.DistributedOptimizer(sgd, each.named_parameters(), sharded=sharded)
            for _ in range(3):
                one.zero_grad()
                halves = each[1](inputs[:, :width].bfloat16())
                (each[0](inputs.float()).square().mean() + halves.square().mean()).backward()
                norms.append(float(one.clip_grad_norm_(0.1)))
                one.step()
        torch.testing.assert_close(norms[:3], norms[3:], rtol=1e-2, atol=0.0)
        for shared, other in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(shared, other)


def a_loss_scaler_needs_gradients_of_all_ranks() -> None:
    model = build()
    optimizer = wrapped(momentum, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    without = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(3):
        backward(model, step)
        without.step(optimizer)
        optimizer.zero_grad()
    if hvd.size() == 1:
        return
    inputs, labels = map(own, batch(0))
    # Without the error the ranks that find no overflow would wait for rank 0.
    overflow = float("inf") if hvd.rank() == 0 else 1.0
    scaler.scale(F.cross_entropy(model(inputs), labels) * overflow).backward()
    assert "call optimizer.synchronize() before scaler.unscale_(optimizer)" in refused(
        RuntimeError, partial(scaler.step, optimizer)
    )
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(model(inputs), labels)).backward()
    optimizer.clip_grad_norm_(1.0)
    refused(RuntimeError, partial(scaler.step, optimizer))
    optimizer.zero_grad()
    assert equal_on_all_ranks(model)


def gradients_of_a_skipped_step_are_freed() -> None:
    model, alone = build(), build()
    optimizer, reference = wrapped(momentum, model), momentum(list(alone.parameters()))
    for step in range(4):
        inputs, labels = batch(step)
        optimizer.sample_weight = len(own(inputs))
        backward(model, step)
        F.cross_entropy(alone(inputs), labels).backward()
        optimizer.clip_grad_norm_(0.1)
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        for each in (optimizer, reference):
            if step != 2:  # when gradients may stay where autograd makes them
                each.step()
            each.zero_grad()
        assert not gradients_of(optimizer).buckets.elsewhere()
    assert difference(model, alone) < 1e-13


def a_parameter_that_leaves_for_a_step() -> None:
    if hvd.size() == 1:
        return
    model = build()
    optimizer = wrapped(momentum, model)
    backward(model, 1)
    optimizer.step()
    kept = optimizer.param_groups[0]["params"].pop()
    backward(model, 2)
    assert "wrap it again after changing param_groups" in refused(RuntimeError, optimizer.step)
    optimizer.param_groups[0]["params"].append(kept)
    optimizer.step()
    assert equal_on_all_ranks(model)


def a_graph_does_not_outlive_the_weights_that_it_was_made_with() -> None:
    for kind in (torch.optim.SGD, torch.optim.Adam, *([torch.optim.Adagrad] if on_host() else [])):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
        model.append(torch.nn.Linear(2, 2))  # which no loss uses
        optimizer = hvd.DistributedOptimizer(kind(model.parameters(), lr=0.1), sharded=True)
        before = [parameter._version for parameter in model.parameters()]
        loss = model[:3](torch.ones(2, 8)).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        changed = [p._version > v for p, v in zip(model.parameters(), before, strict=True)]
        assert changed == [True] * 4 + [False] * 2
        assert "modified by an inplace operation" in refused(RuntimeError, loss.backward)
        optimizer.zero_grad()


def shared_steps_with_gradients_that_have_a_graph() -> None:
    """Dense or sparse, also where rank 0 alone uses a layer; changes of them are still found."""
    torch.manual_seed(7)
    table = torch.nn.Embedding(6, 4, sparse=True).double()
    models = [torch.nn.ModuleList([table, torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]).double()]
    models.append(copy.deepcopy(models[0]))
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(each.parameters(), lr=0.1), sharded=sharded, sparse_as_dense=True
        )
        for each, sharded in zip(models, (True, False), strict=True)
    ]

    def differentiate(model: torch.nn.ModuleList, with_all: bool) -> None:
        tables, *layers = model
        hidden = layers[0](tables(torch.tensor([hvd.rank(), 5])) if with_all else drawn(1, 2, 4))
        loss = (layers[1](hidden) if with_all else hidden).square().sum()
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # of the cycle
            loss.backward(create_graph=True)

    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            differentiate(model, hvd.rank() == 0)
            optimizer.step()
    assert difference(*models) < 1e-13
    assert equal_on_all_ranks(models[0])
    optimizers[0].zero_grad()
    if hvd.size() > 1:
        differentiate(models[0], with_all=True)
        gradient = list(models[0].parameters())[2].grad
        assert gradient is not None
        gradient.detach().mul_(2.0)
        assert "was changed" in refused(RuntimeError, optimizers[0].step)
        optimizers[0].zero_grad()
