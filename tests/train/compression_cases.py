"""Exchanges that compress gradients: what is applied and what is kept is what ranks have given.

The choice of an exchange is alike on all ranks, and has the bits of the chosen from then on.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from compression_formulas import MATRICES, NBitFormula, PowerSGDFormula, TopKFormula
from exchange_formulas import Flat, OfRanks, mean
from exchanging import (
    BITS,
    COUNTS,
    LIMITS,
    TOLERANCE,
    Driven,
    check,
    exchanged,
    kinds,
    layouts,
    of_ranks,
    plan_of,
    values,
    weighed,
)
from forced_costs import SLOW, forced_costs

import hvdtrain.torch as hvd
from hvdtrain.core.exchanges.auto import AutoExchange
from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.core.exchanges.half import HalfExchange
from hvdtrain.core.exchanges.n_bit import NBitExchange
from hvdtrain.core.exchanges.power_sgd import PowerSGDExchange
from hvdtrain.core.exchanges.top_k import TopKExchange
from hvdtrain.core.gradients.exchange import AllreduceExchange, Exchange, StepInfo
from hvdtrain.core.objects import allgather_object
from hvdtrain.types import DType, ReduceOp

MAKERS: Sequence[Callable[[], Exchange]] = (
    lambda: NBitExchange(block=8),
    lambda: NBitExchange(4, block=8),
    lambda: NBitExchange(2, block=0),
    lambda: PowerSGDExchange(1, min_rate=0.1),
    lambda: PowerSGDExchange(2, min_rate=0.1, warm_start=False),
    lambda: TopKExchange(0.2),
)
# Both types and both kinds of memory, in as few steps as do.
KINDS = ((DType.FLOAT32, True), (DType.FLOAT64, False))
DTYPE = DType.FLOAT64
# One step is not timed, two are measured, and during the next one ranks choose.
STEPS, FIRST = 2, 4
NAMES = ("nbit:bits=2/block=8", "powersgd:rank=1/min_rate=0.1")
# The gradient for which each pays.
LARGEST = dict(zip(NAMES, (4, 0), strict=True))


def residuals(exchange: Exchange) -> list[Flat]:
    """Return the sums of all ranks' residuals, by parameter; a rank keeps none that is zero."""
    zeros = {f"residual.p{index}": np.zeros(count) for index, count in enumerate(COUNTS)}
    own = [
        [(zeros | state)[name].astype(np.float64).reshape(-1) for name in zeros]
        for state in allgather_object(exchange.state().own, "residuals")
    ]
    return [sum(each) for each in zip(*own, strict=True)]


def nothing_is_lost() -> int:
    """Several steps, the third with other buckets, the fourth not finite; rank 0 has no samples."""
    cases = 0
    weights = [float(rank) for rank in range(hvd.size())] if hvd.size() > 1 else [2.0]
    for make, nodes in product(MAKERS, layouts()):
        dtype, tensors = KINDS[cases % 2]
        given = None if dtype is DType.FLOAT32 else weights
        driven = Driven(make(), plan_of(dtype, LIMITS[0]), tensors)
        rest = [np.zeros(count) for count in COUNTS]
        for step, finite in enumerate((True, True, True, False, True)):
            if step == 2:
                driven.use_plan(plan_of(dtype, LIMITS[1]))
            info = replace(weighed(step, given), finite=finite)
            found = exchanged(driven, values(step, hvd.rank(), dtype), info, nodes)
            if finite:
                whole = mean(of_ranks(step, dtype), given or [1.0] * hvd.size())
                rest = [r + w - f for r, w, f in zip(rest, whole, found, strict=True)]
            check(found, found, dtype)
        kept = [residual / hvd.size() for residual in residuals(driven.exchange)]
        for one, other in zip(rest, kept, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=4 * TOLERANCE[dtype])
        if len(set(nodes)) == 1:
            assert max(np.abs(residual).max() for residual in kept) == 0.0
        cases += 1
    return cases


def n_bit_follows_its_formula() -> int:
    cases = 0
    for (bits, block), nodes in product(((1, 8), (2, 8), (4, 16), (8, 8), (1, 0)), layouts()):
        plan = plan_of(DType.FLOAT64, LIMITS[1])
        driven = Driven(NBitExchange(bits, block), plan, tensors=False)
        formula = NBitFormula(bits, block, nodes, plan)
        for step in range(3):
            own, info = values(step, hvd.rank(), DType.FLOAT64), StepInfo(step, hvd.size())
            found = exchanged(driven, own, info, nodes)
            check(found, formula.step(of_ranks(step, DType.FLOAT64)), DType.FLOAT64)
        cases += 1
    return cases


def matrices_follow_their_formulas() -> int:
    """Each rank is a node; with one node alone, top-k still has its momentum."""
    size, plan = hvd.size(), plan_of(DType.FLOAT64, LIMITS[1])
    pairs: list[tuple[Exchange, TopKFormula | PowerSGDFormula]] = [
        (TopKExchange(ratio, momentum), TopKFormula(ratio, momentum, size, COUNTS))
        for ratio, momentum in ((0.1, 0.0), (1.0, 0.0), (0.25, 0.5))
    ]
    pairs += [
        (PowerSGDExchange(rank, 0.1, warm), PowerSGDFormula(rank, warm, size, COUNTS))
        for rank, warm in ((1, True), (2, False), (4, True))
    ]
    for exchange, formula in pairs:
        driven = Driven(exchange, plan, tensors=False)
        for step in range(4):
            found = step_of(driven, step, DType.FLOAT64)
            check(found, formula.step(of_ranks(step, DType.FLOAT64)), DType.FLOAT64)
    return len(pairs)


def low_rank_gradient(step: int, rank: int) -> list[Flat]:
    """Return a rank's gradients, whose averages have rank 2, but 0 in step 0 and 1 in step 1."""
    gradients = [np.zeros(count) for count in COUNTS]
    for index, (rows, columns) in MATRICES.items():
        left = np.random.default_rng([step, rank]).standard_normal((rows, 2))
        right = np.random.default_rng(step).standard_normal((2, columns))
        if step < 2:
            right = step * np.eye(2, columns) * [[1], [0]]
        gradients[index] = (left @ right).reshape(-1)
    return gradients


def a_low_rank_does_not_last() -> int:
    """Zeros, and then one column alone, leave zeros in Q, which do not stay."""
    for tensors in (False, True):
        driven = Driven(PowerSGDExchange(2, 0.1), plan_of(DType.FLOAT64, LIMITS[1]), tensors)
        for step in range(4):
            own = [low_rank_gradient(step, rank) for rank in range(hvd.size())]
            found = exchanged(driven, own[hvd.rank()], StepInfo(step, hvd.size()))
            check(found, mean(own, [1.0] * hvd.size()), DType.FLOAT64)
    return 2


def step_of(driven: Driven, step: int, dtype: DType) -> list[Flat]:
    return exchanged(driven, values(step, hvd.rank(), dtype), StepInfo(step, hvd.size()))


def what_is_not_finite_shows() -> int:
    """An infinite gradient of one rank: no rank takes the result for a good one, nor keeps it."""
    for make, (dtype, tensors) in product(MAKERS, KINDS):
        driven = Driven(make(), plan_of(dtype, LIMITS[0]), tensors)
        step_of(driven, 0, dtype)
        before = driven.exchange.state().own
        own = values(1, hvd.rank(), dtype)
        if hvd.rank() == 0:
            for each, bad in zip(own, (np.inf, np.nan, -np.inf, np.nan, np.inf), strict=True):
                each[-1] = bad
        found = exchanged(driven, own, StepInfo(1, hvd.size(), finite=False))
        assert not any(np.isfinite(each).all() for each in found)
        after = driven.exchange.state().own
        assert before.keys() == after.keys()
        assert all((before[name] == after[name]).all() for name in before)
    return len(MAKERS) * len(KINDS)


def rounded(values: Flat, kind: str) -> Flat:
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}[kind]
    result: Flat = torch.from_numpy(values.astype(np.float32)).to(half).double().numpy()
    return result


def sum_in_halves(values: OfRanks, nodes: Sequence[int], kind: str) -> list[Flat]:
    """Return by parameter: the nodes' sums, each rounded, and the rounded sum of these."""
    results = []
    for parts in zip(*values, strict=True):
        of_nodes = dict.fromkeys(nodes, 0 * parts[0])
        for node, own in zip(nodes, parts, strict=True):
            of_nodes[node] = of_nodes[node] + own
        total = sum((rounded(each, kind) for each in of_nodes.values()), 0 * parts[0])
        results.append(rounded(total, kind))
    return results


def of_many_bits(rank: int) -> list[Flat]:
    """Return values with more bits than half types have, whose sums are exact in float32."""
    generator = np.random.default_rng(rank)
    return [generator.integers(-(1 << 16), 1 << 16, count) / 4096 for count in COUNTS]


def sum_and_average_in(
    kind: str, nodes: tuple[int, ...] | None, dtype: DType, tensors: bool
) -> None:
    """Sums bit by bit; averages within half a unit in the last place of the result and of nodes."""
    ranks, plan = range(hvd.size()), plan_of(dtype, 300)
    everybody = [of_many_bits(rank) for rank in ranks]
    own = [each.astype(dtype.numpy) for each in everybody[hvd.rank()]]

    def step(exchange: Exchange, given: list[Flat], weights: list[float] | None) -> list[Flat]:
        return exchanged(Driven(exchange, plan, tensors), given, weighed(0, weights), nodes)

    pairs = [(ReduceOp.SUM, sum_in_halves(everybody, nodes or ranks, kind))]
    if len(set(nodes or ranks)) == 1:  # nothing crosses a network
        ops = (ReduceOp.SUM, ReduceOp.AVERAGE)
        pairs = [(op, step(AllreduceExchange(op), own, None)) for op in ops]
    for op, expected in pairs:
        for one, other in zip(step(HalfExchange(kind, op), own, None), expected, strict=True):
            np.testing.assert_array_equal(one, other)
    weights = [float(rank + 1) for rank in ranks]
    most = 2 * 16 * {"fp16": 2.0**-11, "bf16": 2.0**-8}[kind]
    for predivide in (1.0, 4.0):
        found = step(HalfExchange(kind, predivide=predivide), own, weights)
        for one, other in zip(found, mean(everybody, weights), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=most)
    # What does not fit into fp16 is infinite on all ranks, for a loss scaler to see.
    infinite = step(HalfExchange("fp16"), [np.full(count, 1e30) for count in COUNTS], None)
    assert len(set(nodes or ranks)) == 1 or all(np.isinf(each).all() for each in infinite)


def half_types_cross_the_network() -> int:
    cases = list(product(("fp16", "bf16"), (None, *layouts()), kinds()))
    for kind, nodes, (dtype, tensors) in cases:
        sum_and_average_in(kind, nodes, dtype, tensors)
    return len(cases)


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


CASES = (
    *(nothing_is_lost, n_bit_follows_its_formula, matrices_follow_their_formulas),
    *(a_low_rank_does_not_last, what_is_not_finite_shows, half_types_cross_the_network),
    *(a_choice_has_the_bits_of_the_chosen, all_ranks_choose_alike),
    on_one_node_the_average_is_chosen_at_once,
)
