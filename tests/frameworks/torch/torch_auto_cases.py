"""Optimizers whose exchange is chosen by measurements, against formulas for all ranks."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr

import torch
from exchange_formulas import OneBitFormula, mean
from forced_costs import forced_costs
from nodes import nodes_of_their_own
from one_bit import OneBit
from torch_exchange_cases import backward, dense, flat, gradients, parameters, put, samples, wrapped
from torch_training import Model, case, difference, momentum, plan_of

import hvdtrain.torch as hvd
from hvdtrain.core import context
from hvdtrain.core.exchanges.allreduce import AllreduceExchange
from hvdtrain.core.exchanges.auto import AutoExchange
from hvdtrain.core.gradients.plan import BucketPlan, make_plan
from hvdtrain.core.objects import allgather_object

# One step is not timed, two are measured, and during the next one ranks choose.
STEPS, FIRST = 2, 4
ONE_RANK = ["chosen: average, because there is one rank"]
ONE_NODE = ["chosen: average, because all ranks are on one node"]


@contextmanager
def told() -> Iterator[list[str]]:
    """Collect what exchanges print on this rank in the block."""
    lines: list[str] = []
    with redirect_stderr(io.StringIO()) as stderr:
        yield lines
    start = "hvdtrain: exchange auto: "
    found = stderr.getvalue().splitlines()
    lines += [line.removeprefix(start) for line in found if line.startswith(start)]


def take_step(model: Model, optimizer: hvd.DistributedOptimizer, step: int) -> None:
    """Take a step on this rank's share of a batch."""
    optimizer.sample_weight = samples(step, hvd.rank())
    backward(model, step, hvd.rank())
    optimizer.step()


def final_plan() -> BucketPlan:
    """Return the plan of the model's gradients after the first step."""
    model = dense()
    optimizer = wrapped(model, AllreduceExchange())
    take_step(model, optimizer, 0)
    return plan_of(optimizer)


@case
def large_gradients_are_compressed_and_small_ones_averaged() -> None:
    """One bit for the largest gradient pays, and for no other."""
    if torch.get_default_device().type != "cpu":
        return
    plan = final_plan()
    counts = [spec.count for spec in plan.specs]
    large = counts.index(max(counts))
    alone_in_plan = make_plan([plan.specs[large]], 1 << 20, 1 << 20)
    names = [name for name, _ in dense().named_parameters()]
    own_nodes = allgather_object(context.current().topology.node, "nodes")
    for nodes in (own_nodes, list(range(hvd.size()))):
        one_node = len(set(nodes)) == 1
        model, alone = dense(), dense()
        inner, formula = momentum(parameters(alone)), OneBitFormula(nodes, [counts[large]])
        auto = AutoExchange([OneBit()], STEPS, forced_costs(plan, {"onebit": large}))
        with nullcontext() if nodes == own_nodes else nodes_of_their_own():
            optimizer = wrapped(model, auto)
        with told() as lines:
            for step in range(FIRST + STEPS + 1):
                take_step(model, optimizer, step)
                weights = [samples(step, rank) for rank in range(hvd.size())]
                found = []
                for rank in range(hvd.size()):
                    backward(alone, step, rank)
                    found.append(flat(gradients(alone)))
                results = mean(found, weights)
                if step >= FIRST:
                    compressed = [[of_rank[large]] for of_rank in found]
                    (results[large],) = formula.step(alone_in_plan, compressed, weights)
                put(results, gradients(alone))
                inner.step()
                assert difference(model, alone) < 1e-12, (nodes, step)
        methods = dict.fromkeys(names, "average")
        assert auto.chosen == methods | ({} if one_node else {names[large]: "onebit"})
        words = [line.partition(" ")[0] for line in lines]
        if hvd.rank() > 0:
            assert not lines
        elif one_node:
            assert lines == (ONE_RANK if hvd.size() == 1 else ONE_NODE)
        else:
            assert words == ["between", *[""] * 3, "chosen:", "a"], lines
            assert [line.split("  ")[1] for line in lines[2:4]] == ["average", "onebit and average"]
            assert lines[4].startswith("chosen: average for 3 gradients with "), lines
            assert "ms, predicted " in lines[5], lines
