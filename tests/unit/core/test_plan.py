"""The bucket plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.core.gradients.plan import ParameterSpec, first_difference, make_plan, plan_of_layout
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
    cut = sizes(in_creation_order, 25 * MIB, MIB // 2)
    assert cut == [[0.25], [0.5, 10], [20, 3]]


def test_one_type_and_device_per_bucket() -> None:
    specs = [spec("a", 8), spec("b", 8, DType.FLOAT64), spec("c", 8, device="cuda"), spec("d", 8)]
    plan = make_plan(specs, MIB, MIB)
    assert [bucket.parameters for bucket in plan.buckets] == [(2,), (1,), (3, 0)]
    assert [bucket.dtype for bucket in plan.buckets][1] is DType.FLOAT64


def test_groups_stay_together() -> None:
    specs = [spec(name, MIB) for name in "abcde"]
    plan = make_plan(specs, 2 * MIB, MIB, groups=[(0, 3, 4)])
    assert {bucket.parameters for bucket in plan.buckets} == {(4, 3, 0), (2,), (1,)}


@given(
    counts=st.lists(st.integers(0, 300), max_size=40),
    cap=st.integers(1, 400),
    first=st.integers(1, 400),
)
def test_every_gradient_is_in_one_bucket_in_one_place(
    counts: list[int], cap: int, first: int
) -> None:
    specs = [spec(str(i), 4 * count) for i, count in enumerate(counts)]
    plan = make_plan(specs, cap, first)
    assert sorted(i for bucket in plan.buckets for i in bucket.parameters) == list(
        range(len(specs))
    )
    for bucket in plan.buckets:
        ends = [
            start + specs[i].count
            for i, start in zip(bucket.parameters, bucket.starts, strict=True)
        ]
        assert [0, *ends] == [*bucket.starts, bucket.count]
    assert make_plan(specs, cap, first).digest == plan.digest


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
