"""Exchanges of hvdtrain.keras chosen by measurements, in loops of one's own and in `fit`."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from typing import Any

import keras
import numpy as np
from forced_costs import forced_costs
from keras_exchange_cases import rounded
from keras_fit_cases import dense_model, fit
from keras_optimizer_cases import (
    SHAPES,
    Array,
    assert_close,
    digest,
    gradients,
    mean_gradients,
    own,
    stepped,
)
from nodes import nodes_of_their_own

import hvdtrain.keras as hvd
from hvdtrain.core.exchanges.auto import AutoExchange
from hvdtrain.core.exchanges.warm_up import WarmUp
from hvdtrain.core.gradients.plan import ParameterSpec, make_plan
from hvdtrain.core.objects import allgather_object
from hvdtrain.types import DType

# One step is averaged, one is not timed, two are measured, and during the next one ranks choose.
WARM_UP, STEPS, FIRST = 1, 2, 5
LAST = FIRST + 1 + STEPS
# Whatever is chosen of these, it is the average.
EXACT = f"auto:allow=powersgd:rank=99/min_rate=0.001+topk:ratio=1,steps={STEPS}"


def told(stderr: io.StringIO) -> list[str]:
    """Return what the exchange has printed on this rank."""
    start = "hvdtrain: exchange auto: "
    lines = stderr.getvalue().splitlines()
    return [line.removeprefix(start) for line in lines if line.startswith(start)]


def forced() -> Any:
    """Return an optimizer for which 16 bits pay for the first gradient alone."""
    specs = [
        ParameterSpec(str(number), shape, (), DType.FLOAT32, "float32", "cpu")
        for number, shape in enumerate(SHAPES)
    ]
    costs = forced_costs(make_plan(specs, 1 << 20, 1 << 20), {"half": 0})
    exchange = WarmUp(AutoExchange("half", STEPS, costs), WARM_UP)
    return hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), exchange=exchange)


def a_choice_is_by_gradient() -> str:
    """The first one has 16 bits between nodes from then on; the others are averaged."""

    def combined(step: int) -> list[Array]:
        found = mean_gradients(step)
        if step >= FIRST and hvd.size() > 1:
            parts = [rounded(gradients(step, rank)[0]) for rank in range(hvd.size())]
            found[0] = rounded(np.mean(parts, axis=0))
        return found

    optimizer, stderr = forced(), io.StringIO()
    with nodes_of_their_own(), redirect_stderr(stderr):
        mine = stepped(optimizer, own, LAST)
        plain = stepped(keras.optimizers.SGD(0.1, momentum=0.9), combined, LAST)
        assert_close(mine, plain, rtol=1e-6)
    lines, names = told(stderr), [f"gradient {number}" for number in range(len(SHAPES))]
    if hvd.size() == 1:
        assert lines == ["chosen: average, because there is one rank"]
        assert optimizer.exchange.chosen == {}
    else:
        averaged = dict.fromkeys(names, "average")
        assert optimizer.exchange.chosen == averaged | {"gradient 0": "half"}
        assert [line.partition(" ")[0] for line in lines] == (
            ["between", "", "", "", "chosen:", "a"] if hvd.rank() == 0 else []
        )
    return digest(mine)


def a_choice_is_kept_by_a_checkpoint() -> str:
    """Another optimizer goes on with the same bits, and measures nothing."""
    if hvd.size() == 1:
        return ""
    optimizer, half = forced(), FIRST + 1
    with nodes_of_their_own():
        variables = stepped(optimizer, own, half)
        saved = optimizer.exchange_state()
        values = [keras.ops.convert_to_numpy(v) for v in (*variables, *optimizer.variables)]
        resumed = forced()
        copies = [keras.Variable(value) for value in values[: len(variables)]]
        resumed.build(copies)
        for variable, value in zip((*copies, *resumed.variables), values, strict=True):
            variable.assign(value)
        resumed.load_exchange_state(saved)
        for step in range(half, half + 2):
            for each, its in ((optimizer, variables), (resumed, copies)):
                each.apply([keras.ops.convert_to_tensor(g) for g in own(step)], its)
    assert resumed.exchange.chosen == optimizer.exchange.chosen
    assert digest(copies) == digest(variables)
    return digest(copies)


def fit_measures_and_chooses() -> str:
    """Real measurements; all ranks choose alike."""
    ends = []
    stderr = io.StringIO()
    for exchange in (None, EXACT):
        model = dense_model(seed=5)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), exchange=exchange)
        model.compile(optimizer, loss="mse")
        with nodes_of_their_own(), redirect_stderr(stderr):
            fit(model, hvd.rank())
        ends.append(model)
    assert_close(ends[1].weights, ends[0].weights, rtol=1e-3)
    lines, chosen = told(stderr), ends[1].optimizer.exchange.chosen
    assert sum(line.startswith("chosen: ") for line in lines) == (hvd.rank() == 0)
    if hvd.size() > 1:
        assert len(chosen) == 4
        assert len({str(each) for each in allgather_object(chosen, "chosen")}) == 1
    return digest(ends[1].weights)


CASES = [a_choice_is_by_gradient, a_choice_is_kept_by_a_checkpoint, fit_measures_and_chooses]
