"""The bucket plan, the size of its buckets, and the segments of owners."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.config import DEFAULT_BUCKET_BYTES
from hvdtrain.core.gradients.plan import (
    ParameterSpec,
    choose_bucket_size,
    first_difference,
    make_plan,
    plan_of_layout,
)
from hvdtrain.core.sharding.segments import Quantity, StateLayout, segments_of
from hvdtrain.types import DType

MIB = 1 << 20


def spec(
    name: str, nbytes: int, dtype: DType = DType.FLOAT32, device: str = "cpu"
) -> ParameterSpec:
    count = nbytes // dtype.itemsize
    return ParameterSpec(name, (count,), (1,), dtype, dtype.value, device)


def sizes(specs: list[ParameterSpec], cap: int, first: int) -> list[list[float]]:
    plan = make_plan(specs, cap, first)
    return [[specs[i].nbytes / MIB for i in bucket.parameters] for bucket in plan.buckets]


def test_reverse_order_small_first_bucket_and_caps() -> None:
    in_creation_order = [spec(str(s), int(s * MIB)) for s in (3, 20, 10, 0.5, 0.25)]
    assert sizes(in_creation_order, 25 * MIB, MIB // 2) == [[0.25], [0.5, 10], [20, 3]]


def test_one_type_and_device_per_bucket() -> None:
    specs = [spec("a", 8), spec("b", 8, DType.FLOAT64), spec("c", 8, device="cuda"), spec("d", 8)]
    plan = make_plan(specs, MIB, MIB)
    assert [bucket.parameters for bucket in plan.buckets] == [(2,), (1,), (3, 0)]
    assert [bucket.dtype for bucket in plan.buckets][1] is DType.FLOAT64


def test_groups_stay_together() -> None:
    plan = make_plan([spec(name, MIB) for name in "abcde"], 2 * MIB, MIB, groups=[(0, 3, 4)])
    assert {bucket.parameters for bucket in plan.buckets} == {(4, 3, 0), (2,), (1,)}


def test_a_layout_gives_the_plan_again() -> None:
    specs = [spec("w", 4 * MIB), spec("b", MIB), spec("i", 8, DType.FLOAT64), spec("v", 3 * MIB)]
    before = make_plan(specs, 5 * MIB, MIB, order=[1, 3, 0, 2])
    assert plan_of_layout(make_plan(specs, 9, 9), before.layout) == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"buckets": [[0]]},
        {"buckets": [[0, 1], [1, 2]]},
        {"buckets": [[0, 1], [2], [7]]},
        {"buckets": [[0, 2], [1]]},
        {"buckets": [0, 1]},
        {"buckets": None},
    ],
)
def test_a_layout_of_other_parameters_is_refused(wrong: dict[str, Any]) -> None:
    plan = make_plan([spec("w", 4), spec("b", 4), spec("i", 8, DType.FLOAT64)], MIB, MIB)
    with pytest.raises(ValueError, match=r"this (is no|bucket plan)"):
        plan_of_layout(plan, {**plan.layout, **wrong})
    with pytest.raises(ValueError, match="this is no bucket plan"):
        plan_of_layout(plan, {"buckets": plan.layout["buckets"]})


def test_the_first_difference_is_named() -> None:
    ours = [spec("a", 8), spec("b", 8)]
    assert first_difference(ours, ours) is None
    renamed = [ours[0], replace(ours[1], name="c")]
    assert first_difference(renamed, ours) == "parameter 'c', but rank 0 has 'b' in its place"
    other = [ours[0], spec("b", 8, DType.FLOAT64)]
    assert first_difference(other, ours, 3) == ("parameter 'b': shape (1,), but rank 3 has (2,)")
    assert first_difference(ours[:1], ours) == "1 parameters, but rank 0 has 2"


def measured(latency_us: float, gigabytes: float) -> list[tuple[int, float]]:
    return [(n, latency_us * 1e-6 + n / gigabytes / 1e9) for n in (0, MIB, 4 * MIB)]


@given(st.floats(0.1, 1e5), st.floats(0.001, 1000))
def test_latency_is_at_most_a_twentieth_within_the_bounds(
    latency_us: float, gigabytes: float
) -> None:
    nbytes = choose_bucket_size(measured(latency_us, gigabytes)).nbytes
    latency, moving = latency_us * 1e-6, nbytes / gigabytes / 1e9
    assert nbytes.bit_count() == 1
    assert MIB <= nbytes <= 64 * MIB
    assert nbytes == 64 * MIB or latency / (latency + moving) <= 0.05 * (1 + 1e-6)
    assert nbytes == MIB or latency / (latency + moving / 2) >= 0.05 * (1 - 1e-6)


def test_noise_gives_the_default() -> None:
    size = choose_bucket_size([(4096, 3e-3), (65536, 2e-3)])
    assert size.nbytes == DEFAULT_BUCKET_BYTES
    assert "too noisy" in size.reason


@pytest.mark.parametrize("owners", [2, 3, 4, 8])
def test_no_owner_has_more_than_its_share(owners: int) -> None:
    """Of a transformer's parameters, and of Adam's state with what aligns it."""
    shapes: list[tuple[int, ...]] = [(5000, 512)]
    for _ in range(6):
        shapes += [(1536, 512), (1536,), (512, 512), (512,), (2048, 512), (2048,), (512, 2048)]
        shapes += [(512,)] * 5
    specs = [
        ParameterSpec(f"p{number}", shape, (1,) * len(shape), DType.FLOAT32, "float32", "cpu")
        for number, shape in enumerate(shapes)
    ]
    plan = make_plan(specs, 8 << 20, 1 << 20)
    adam = {
        "step": Quantity("step", DType.FLOAT32, elementwise=False),
        "exp_avg": Quantity("exp_avg", DType.FLOAT32, elementwise=True),
        "exp_avg_sq": Quantity("exp_avg_sq", DType.FLOAT32, elementwise=True),
    }
    whole = 2 * sum(spec.nbytes for spec in specs)
    for segments in segments_of(plan, owners):
        assert StateLayout.of(segments, [adam] * len(specs)).nbytes < whole * (1 / owners + 0.02)
    costs = [0, *(spec.count for spec in specs[1:])]
    found = segments_of(plan, owners, costs)
    assert sorted(s.parameter for own in found for s in own) == list(range(len(costs)))
    assert max(sum(costs[s.parameter] for s in own) for own in found) < sum(costs) * 1.15 / owners
