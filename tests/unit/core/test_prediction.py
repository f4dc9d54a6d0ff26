"""Predicted steps and the choice among exchanges, by formula; rehearsals by what they send."""

from collections.abc import Sequence
from itertools import product
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import pytest

from hvdtrain.buffer import Buffer
from hvdtrain.core.exchanges.auto import AutoExchange
from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.core.exchanges.costs import (
    Measured,
    as_in_steps,
    best,
    choice_line,
    predict,
    prediction_lines,
    predictions,
)
from hvdtrain.core.exchanges.half import HalfExchange
from hvdtrain.core.exchanges.local_sgd import LocalSGD
from hvdtrain.core.exchanges.measured_costs import StepTimes, rehearse
from hvdtrain.core.exchanges.warm_up import WarmUp
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import (
    AllreduceExchange,
    Exchange,
    ExchangeState,
    FilledBucket,
    StepInfo,
)
from hvdtrain.core.gradients.plan import AllreduceCost, BucketPlan, ParameterSpec, make_plan
from hvdtrain.engines.local import LocalCommunicator
from hvdtrain.types import ReduceOp

FREE = AllreduceCost(0.0, float("inf"))


def spec_of(name: str, *shape: int) -> ParameterSpec:
    return ParameterSpec.of_array(name, shape, "float32", "float32")


def plan_of(counts: Sequence[int], bucket_bytes: int) -> BucketPlan:
    specs = [spec_of(f"p{number}", count) for number, count in enumerate(counts)]
    return make_plan(specs, bucket_bytes, bucket_bytes)


class Method(NamedTuple):
    """What an exchange costs: its calls, the seconds of a run, and seconds and bytes of each."""

    name: str
    calls: float
    start: float
    seconds: Sequence[float]
    nbytes: Sequence[float]


def compressing(name: str, plan: BucketPlan, rate: float, start: float, speed: float) -> Method:
    sizes = [spec.nbytes for spec in plan.specs]
    return Method(name, 2, start, [n / speed for n in sizes], [rate * n for n in sizes])


def average(plan: BucketPlan, start: float = 0.0) -> Method:
    return Method("average", 1, start, [0.0] * len(plan.specs), [s.nbytes for s in plan.specs])


def measured_of(
    link: AllreduceCost,
    ready: Sequence[float],
    *methods: Method,
    nodes: int = 2,
    owners: int = 1,
    node: AllreduceCost = FREE,
    **rest: Any,
) -> Measured:
    names, calls, starts, seconds, nbytes = zip(*methods, strict=True)
    costs = calls, starts, np.array(seconds), np.array(nbytes)
    return Measured(nodes, owners, link, node, ready, names, *costs, **rest)


def on_link(link: AllreduceCost, plan: BucketPlan, *methods: Method) -> Measured:
    ready = [0.001 * (1 + number) for number in range(len(plan.buckets))]
    return measured_of(link, ready, average(plan), *methods)


def test_owners_and_the_node_have_their_share() -> None:
    plan = plan_of([1000, 1000], 1 << 20)
    method = compressing("half", plan, 0.5, start=0.003, speed=1e6)
    link, node = AllreduceCost(0.01, 1e6), AllreduceCost(0.1, 1e5)
    given = measured_of(link, [0.5], average(plan), method, nodes=3, owners=2, node=node)
    found = predict(given, plan, [0, 1])
    parts = (0.1 + 8000 / 1e5, 0.01 + 4000 / 1e6 / 2, 2 * 0.01 + 0.003 + (4000 + 2000) / 1e6 / 2)
    assert found.seconds == pytest.approx(0.5 + sum(parts))
    assert found.sent_bytes == pytest.approx((4000 + 2000) * 2 * 2 / 3)


def test_computations_of_the_channel_delay_the_gradients_after_them() -> None:
    """By the share of the cores that they take, and as far as the average does not compute."""
    plan = plan_of([1000, 1000], 4000)
    method = compressing("half", plan, 0.5, start=0.003, speed=1e6)
    methods, link = (average(plan, 0.001), method), AllreduceCost(0.0, 1e6)
    measured = measured_of(link, [0.1, 0.2], *methods, core_share=0.5, rest_seconds=0.7)
    delay = 0.5 * (0.003 + 4000 / 1e6 - 0.001)
    averaging, halving = 0.001 + 4000 / 1e6, 0.003 + 6000 / 1e6
    for choice, last in (([1, 1], delay + halving), ([1, 0], halving), ([0, 1], delay + averaging)):
        assert predict(measured, plan, choice).seconds == pytest.approx(0.9 + last)


def test_the_average_takes_as_long_as_in_the_steps() -> None:
    """The network is as much slower as reductions were; the rest of a step is waiting."""
    plan = plan_of([1000, 1000], 4000)
    method = compressing("half", plan, 0.5, start=0.003, speed=1e6)
    alone = on_link(AllreduceCost(0.001, 1e6), plan, method)  # 0.001 + 0.004 for each bucket
    found = as_in_steps(alone, plan, 0.03, 0.5)
    link = found.network
    assert (link.latency_seconds, link.bytes_per_second) == pytest.approx((0.003, 1e6 / 3))
    assert predict(found, plan, [0, 0]).seconds == pytest.approx(0.5)
    halved = 0.003 + 0.004 + 3 * (2 * 0.001 + 0.002)
    both = 0.001 + 2 * halved + 0.5 - (0.001 + 0.03)
    assert predict(found, plan, [1, 1]).seconds == pytest.approx(both)
    at_once = as_in_steps(alone, plan, 0.001, 0.005)  # as on a device
    assert (at_once.network, at_once.rest_seconds) == (alone.network, 0.0)


def test_no_other_choice_is_shorter() -> None:
    """Of all choices among three methods for six gradients in two buckets."""
    generator = np.random.default_rng(0)
    plan = plan_of([10, 5000, 20, 8000, 3000, 40], 45_000)
    assert len(plan.buckets) == 2
    for _ in range(20):
        methods = [
            Method(str(n), n, 1e-4 * n, seconds, 1e6 * nbytes)
            for n, (seconds, nbytes) in enumerate(generator.uniform(0, 0.002, (3, 2, 6)))
        ]
        link = AllreduceCost(generator.uniform(0, 0.001), 1e6)
        measured = measured_of(link, [0.0, 0.0], *methods)
        choices = product(range(3), repeat=6)
        shortest = min(predict(measured, plan, choice).seconds for choice in choices)
        found = predictions(measured, plan)
        assert min(each.seconds for each in found) == pytest.approx(shortest)
        assert found[0].choice == (0,) * 6


def test_small_gradients_stay_plain_and_large_ones_are_compressed() -> None:
    plan = plan_of([100, 1 << 20, 200, 1 << 20], 1 << 10)
    method = compressing("nbit", plan, 1 / 32, start=0.001, speed=1e9)
    slow = on_link(AllreduceCost(1e-4, 1e8), plan, method)
    assert best(predictions(slow, plan)).choice == (0, 1, 0, 1)
    fast = on_link(AllreduceCost(1e-5, 1e11), plan, method)
    assert best(predictions(fast, plan)).choice == (0, 0, 0, 0)


def test_a_gain_of_less_than_5_percent_does_not_count() -> None:
    plan = plan_of([1000], 1 << 20)
    link = AllreduceCost(0.0, 4000.0)  # one second
    for rate, chosen in ((0.96, 0), (0.94, 1)):
        method = compressing("half", plan, rate, start=0.0, speed=1e12)
        measured = measured_of(link, [0.0], average(plan), method)
        assert best(predictions(measured, plan)).choice == (chosen,)


def test_each_gradient_may_have_another_method() -> None:
    plan = plan_of([1 << 20, 1 << 20], 1 << 10)
    first = Method("a", 1, 0.0, [0.0, 1.0], [10.0, 10.0])
    second = Method("b", 1, 0.0, [1.0, 0.0], [10.0, 10.0])
    measured = on_link(AllreduceCost(1e-4, 1e7), plan, first, second)
    found = predictions(measured, plan)
    assert [each.choice for each in found] == [(0, 0), (1, 0), (0, 2), (1, 2)]
    assert best(found).choice == (1, 2)
    lines = prediction_lines(measured, found, None)
    assert "an all-reduce starts in 100 us and runs at 0.01 GB/s; predictions" in lines[0]
    assert [line.split("  ")[1] for line in lines[2:]] == [
        *("average", "a and average", "b and average", "b and a")
    ]
    assert choice_line(["average", "a", "b"], plan, (1, 2)) == (
        "chosen: a for 1 gradient with 50.0 % of the elements, b for 1 gradient with 50.0 % of the "
        "elements"
    )


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_rehearsals_count_what_would_be_sent(nodes: int) -> None:
    """As sizes of all-reduces, which move 2 (n - 1) / n of their bytes."""
    rows, columns = 96, 128
    spec, count = spec_of("matrix", rows, columns), rows * columns
    memory = Buffer.from_array(np.empty(0, np.float32))
    blocks = count // 64
    expected = {
        "average": (4 * count, 1),
        "half": (2 * count, 2),
        "nbit:bits=8,block=64": (count + 8 * blocks, 2),
        "powersgd:rank=4": (4 * 4 * (rows + columns), 2),
        "topk:ratio=0.01": (8 * ceil(0.01 * count) * nodes / 2, 1),
    }
    for text, (nbytes, calls) in expected.items():
        found = rehearse(make_exchange(text), spec, memory, nodes)
        assert found.calls == calls
        assert found.nbytes == pytest.approx(nbytes, rel=0.02)
        assert found.seconds > 0


def test_buckets_are_timed_from_the_end_of_the_step_before() -> None:
    times = StepTimes()
    for end, first, last in ((10.0, 9.0, 9.5), (20.0, 12.0, 14.0), (31.0, 21.0, 26.0)):
        times.note_bucket(first, 0.25)
        times.note_bucket(last, end - last)
        times.end_step(end)
    assert times.seconds == [10.0, 11.0]
    assert times.ready_seconds() == [1.5, 5.0]
    assert times.reduced_seconds() == [0.25, 5.5]
    assert times.median_seconds() == 10.5


def test_candidates_are_exchanges_of_gradients_between_nodes() -> None:
    given: tuple[Exchange, ...] = (LocalSGD(2), AllreduceExchange())
    for each in given:
        with pytest.raises(ValueError, match="is not an exchange of gradients between nodes"):
            AutoExchange([each])
    with pytest.raises(ValueError, match="does not average, as auto does"):
        AutoExchange([HalfExchange(op=ReduceOp.SUM)])
    for begins in (WarmUp(HalfExchange(), 2), AutoExchange()):
        with pytest.raises(ValueError, match="begins with plain averages, as auto does by itself"):
            AutoExchange([begins])
    names: Any = ["half"]
    with pytest.raises(TypeError, match="allow must hold exchanges, or be text, got 'half'"):
        AutoExchange(names)
    with pytest.raises(ValueError, match="must have the methods average, half"):
        AutoExchange("half", measured=on_link(FREE, plan_of([8], 1 << 10)))
    specs = make_exchange("auto:allow=nbit:bits=2/block=64+average+topk,steps=3").spec
    assert specs.startswith("auto:steps=3 of allreduce:op=average")
    assert "or nbit:bits=2,block=64 or topk:ratio=0.01" in specs


class Planned(HalfExchange):
    """Half types, which note the plan."""

    plan = BucketPlan((), (), 0, 0)

    def prepare(self, plan: BucketPlan) -> None:
        self.plan = plan

    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        assert bucket.specs is self.plan.specs


def test_what_was_chosen_is_prepared_for_later_plans() -> None:
    auto = AutoExchange([Planned()])
    auto.load(ExchangeState({"auto choice": np.array([1, 1])}))
    for count in (4, 8):
        plan = plan_of([count], 1 << 10)
        auto.prepare(plan)
        buffer = Buffer.from_array(np.ones(count, np.float32))
        bucket = FilledBucket(0, buffer, plan.buckets[0], plan.specs)
        auto.reduce(bucket, StepInfo(0, 1), Communicators.flat(LocalCommunicator()))
