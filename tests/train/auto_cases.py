"""The choice of an exchange: alike on all ranks, and from then on with the bits of the chosen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from exchange_formulas import Flat, mean
from exchange_ranks import BITS, LIMITS, TOLERANCE, exchanged, layouts, of_ranks, values
from exchanging import Driven, plan_of

import hvdtrain.torch as hvd
from hvdtrain.core.exchanges.auto import AutoExchange
from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.core.gradients.bucket_size import AllreduceCost
from hvdtrain.core.gradients.exchange import ExchangeState, StepInfo
from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.core.objects import allgather_object
from hvdtrain.core.prediction.costs import GradientCost, Measured, Method
from hvdtrain.types import DType

__all__ = ["AUTO_CASES"]

DTYPE = DType.FLOAT64
# One step is not timed, two are measured, and during the next one ranks choose.
STEPS, FIRST = 2, 4
NAMES = ("nbit:bits=2/block=8", "powersgd:rank=1/min_rate=0.1")


def measured(plan: BucketPlan, bandwidth: float, largest: Sequence[int]) -> Measured:
    """Return measurements in which method m + 1 saves nearly all of gradients `largest[m]`.

    Args:
        plan: bucket plan.
        bandwidth: bytes per second between nodes.
        largest: index of a gradient for each method.
    """
    sizes = [float(spec.nbytes) for spec in plan.specs]
    methods = [Method("average", 1, 0.0, tuple(GradientCost(0.0, size) for size in sizes))]
    for name, index in zip(NAMES, largest, strict=True):
        costs = [GradientCost(1e-3, size) for size in sizes]
        costs[index] = GradientCost(1e-3, 0.01 * sizes[index])
        methods.append(Method(name, 1, 1e-4, tuple(costs)))
    link, ready = AllreduceCost(1e-4, bandwidth), (0.0,) * len(plan.buckets)
    return Measured(2, 1, link, AllreduceCost(0.0, float("inf")), ready, tuple(methods))


def take(driven: Driven, step: int, nodes: tuple[int, ...]) -> list[Flat]:
    """Take a step on plain gradients."""
    return exchanged(driven, values(step, hvd.rank(), DTYPE), StepInfo(step, hvd.size()), nodes)


def far_apart() -> list[tuple[int, ...]]:
    """Return the layouts with a network."""
    return [nodes for nodes in layouts() if len(set(nodes)) > 1]


def a_choice_has_the_bits_of_the_chosen() -> int:
    """A link of 1 kB/s is worth any compression, and one of 1 TB/s is not."""
    for nodes in far_apart():
        plan = plan_of(DTYPE, 1)  # a bucket for each gradient
        for bandwidth in (1e3, 1e12):
            given = measured(plan, bandwidth, (4, 0))
            auto = AutoExchange("+".join(NAMES), STEPS, given)
            driven = Driven(auto, plan, tensors=False)
            plain = Driven(make_exchange("average"), plan, tensors=False)
            others = [make_exchange(name.replace("/", ",")) for name in NAMES]
            chosen = [Driven(each, plan, tensors=False) for each in others]
            for step in range(FIRST + 3):
                found, expected = take(driven, step, nodes), take(plain, step, nodes)
                if step >= FIRST:
                    own = [take(each, step, nodes) for each in chosen]
                    if bandwidth == 1e3:
                        expected[4], expected[0] = own[0][4], own[1][0]
                for one, other in zip(found, expected, strict=True):
                    assert (one == other).all()
                    BITS.update(one.tobytes())
                assert (auto.chosen is None) == (step < FIRST - 1)
            slow = {"p4": NAMES[0], "p0": NAMES[1]} if bandwidth == 1e3 else {}
            assert auto.chosen == {spec.name: "average" for spec in plan.specs} | slow
    return 2 * len(far_apart())


def all_ranks_choose_alike() -> int:
    """What they really measure, whatever it is, and with runs within a bucket."""
    for nodes in far_apart():
        auto = AutoExchange("half+nbit:block=8+powersgd:rank=1/min_rate=0.1+topk", steps=1)
        driven = Driven(auto, plan_of(DTYPE, LIMITS[0]), tensors=True)
        for step in range(FIRST + 1):
            for each in take(driven, step, nodes):
                BITS.update(each.tobytes())
        choices = allgather_object(auto.chosen, "choices")
        assert choices[0] is not None
        assert all(choice == choices[0] for choice in choices)
    return len(far_apart())


def on_one_node_the_average_is_chosen_at_once() -> int:
    nodes = (0,) * hvd.size()
    auto = AutoExchange("topk:ratio=0.01")
    driven = Driven(auto, plan_of(DTYPE, LIMITS[1]), tensors=False)
    for step in range(2):
        expected = mean(of_ranks(step, DTYPE), [1.0] * hvd.size())
        for one, other in zip(take(driven, step, nodes), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE[DTYPE])
        assert set((auto.chosen or {}).values()) == {"average"}
    return 1


def a_choice_goes_through_a_checkpoint() -> int:
    """Runs of several methods in one bucket; a state from before the choice begins anew."""
    for nodes in far_apart():
        plan = plan_of(DTYPE, LIMITS[0])
        given = measured(plan, 1e3, (4, 0))
        driven = Driven(AutoExchange("+".join(NAMES), STEPS, given), plan, tensors=False)
        early = driven.exchange.state()
        for step in range(FIRST + 2):
            take(driven, step, nodes)
        state = driven.exchange.state()
        resumed = Driven(AutoExchange("+".join(NAMES), STEPS, given), plan, tensors=False)
        resumed.exchange.load(state)
        for step in (FIRST + 2, FIRST + 3):
            pairs = zip(take(driven, step, nodes), take(resumed, step, nodes), strict=True)
            for one, other in pairs:
                assert (one == other).all()
                BITS.update(one.tobytes())
        assert isinstance(resumed.exchange, AutoExchange)
        assert set((resumed.exchange.chosen or {}).values()) == {"average", *NAMES}
        resumed.exchange.load(early)
        assert resumed.exchange.chosen is None
    return len(far_apart())


def another_number_of_ranks_chooses_anew() -> int:
    for nodes in far_apart():
        plan = plan_of(DTYPE, LIMITS[0])
        auto = AutoExchange("+".join(NAMES), STEPS, measured(plan, 1e3, (4, 0)))
        driven = Driven(auto, plan, tensors=False)
        for step in range(FIRST):
            take(driven, step, nodes)
        shared = dict(auto.state().shared)
        shared["auto choice"] = shared["auto choice"] + np.eye(1, 6, dtype=np.int64)[0]
        auto.load(ExchangeState(shared))
        assert auto.chosen is not None
        for step in range(FIRST):
            take(driven, step, nodes)
            assert (auto.chosen is None) == (step < FIRST - 1)
    return len(far_apart())


AUTO_CASES = (
    a_choice_has_the_bits_of_the_chosen,
    all_ranks_choose_alike,
    on_one_node_the_average_is_chosen_at_once,
    a_choice_goes_through_a_checkpoint,
    another_number_of_ranks_chooses_anew,
)
