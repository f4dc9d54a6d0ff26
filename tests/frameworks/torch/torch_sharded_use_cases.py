"""How people use shared optimizer steps: clipping, loss scalers, copies, frozen and new weights."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import torch
from torch.nn import functional as F
from torch_sharded_cases import equal_on_all_ranks, in_node_memory, on_host, wrapped
from torch_training import Model, batch, build, difference, drawn, momentum, own, refused

import hvdtrain.torch as hvd


def backward(model: Model, step: int) -> None:
    inputs, labels = map(own, batch(step))
    dtype = next(model.parameters()).dtype
    F.cross_entropy(model(inputs.to(dtype)), labels).backward()


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
