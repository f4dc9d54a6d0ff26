"""The choice of an exchange: alike on all ranks, and from then on with the bits of the chosen."""

from __future__ import annotations

import numpy as np
from exchange_formulas import Flat, mean
from exchange_ranks import BITS, LIMITS, TOLERANCE, exchanged, layouts, of_ranks, values
from exchanging import Driven, plan_of
from forced_costs import SLOW, forced_costs

import hvdtrain.torch as hvd
from hvdtrain.core.exchanges.auto import AutoExchange
from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.core.gradients.exchange import StepInfo
from hvdtrain.core.objects import allgather_object
from hvdtrain.types import DType

DTYPE = DType.FLOAT64
# One step is not timed, two are measured, and during the next one ranks choose.
STEPS, FIRST = 2, 4
NAMES = ("nbit:bits=2/block=8", "powersgd:rank=1/min_rate=0.1")
# The gradient for which each pays.
LARGEST = dict(zip(NAMES, (4, 0), strict=True))


def take(driven: Driven, step: int, nodes: tuple[int, ...]) -> list[Flat]:
    return exchanged(driven, values(step, hvd.rank(), DTYPE), StepInfo(step, hvd.size()), nodes)


def far_apart() -> list[tuple[int, ...]]:
    return [nodes for nodes in layouts() if len(set(nodes)) > 1]


def a_choice_has_the_bits_of_the_chosen() -> int:
    """A link of 1 kB/s is worth any compression, and one of 1 TB/s is not."""
    for nodes in far_apart():
        plan = plan_of(DTYPE, 1)  # a bucket for each gradient
        for bandwidth in (SLOW, 1e12):
            given = forced_costs(plan, LARGEST, bandwidth)
            auto = AutoExchange("+".join(NAMES), STEPS, given)
            driven = Driven(auto, plan, tensors=False)
            plain = Driven(make_exchange("average"), plan, tensors=False)
            others = [make_exchange(name.replace("/", ",")) for name in NAMES]
            chosen = [Driven(each, plan, tensors=False) for each in others]
            for step in range(FIRST + 3):
                found, expected = take(driven, step, nodes), take(plain, step, nodes)
                if step >= FIRST:
                    own = [take(each, step, nodes) for each in chosen]
                    if bandwidth == SLOW:
                        expected[4], expected[0] = own[0][4], own[1][0]
                for one, other in zip(found, expected, strict=True):
                    assert (one == other).all()
                    BITS.update(one.tobytes())
                assert (auto.chosen is None) == (step < FIRST - 1)
            slow = {"p4": NAMES[0], "p0": NAMES[1]} if bandwidth == SLOW else {}
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


AUTO_CASES = (
    a_choice_has_the_bits_of_the_chosen,
    all_ranks_choose_alike,
    on_one_node_the_average_is_chosen_at_once,
)
