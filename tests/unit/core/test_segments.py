"""Segments of parameters and the layout of their state: exact covers, without launching ranks."""

from __future__ import annotations

import pytest

from hvdtrain.core.gradients.plan import ParameterSpec, make_plan
from hvdtrain.core.sharding.segments import Quantity, StateLayout, segments_of
from hvdtrain.engines.features import aligned_bounds
from hvdtrain.types import DType

SHAPES = [(3, 5), (0,), (1000,), (64, 64), (7,), (), (129, 3)]
SPECS = [
    ParameterSpec(f"p{number}", shape, (1,) * len(shape), DType.FLOAT32, "float32", "cpu")
    for number, shape in enumerate(SHAPES)
]


@pytest.mark.parametrize("owners", [1, 2, 3, 8])
@pytest.mark.parametrize("bucket_bytes", [100, 5000, 1 << 20])
def test_every_element_has_one_owner(owners: int, bucket_bytes: int) -> None:
    plan = make_plan(SPECS, bucket_bytes, 100)
    found = segments_of(plan, owners)
    assert len(found) == owners
    elements = [
        (segment.parameter, element)
        for segments in found
        for segment in segments
        for element in range(segment.first, segment.first + segment.count)
    ]
    assert sorted(elements) == [(i, e) for i, spec in enumerate(SPECS) for e in range(spec.count)]
    for owner, segments in enumerate(found):
        assert len({segment.parameter for segment in segments}) == len(segments)
        for segment in segments:
            bucket = plan.buckets[segment.bucket]
            position = bucket.starts[bucket.parameters.index(segment.parameter)]
            assert segment.start == position + segment.first
            low, high = aligned_bounds(bucket.count, owners)[owner : owner + 2]
            inside = low <= segment.start < segment.start + segment.count <= high
            assert inside if segment.count else owner == 0


@pytest.mark.parametrize(("count", "owners"), [(0, 2), (1, 3), (64, 2), (65, 2), (1_000_003, 7)])
def test_slices_are_whole_cache_lines(count: int, owners: int) -> None:
    bounds = aligned_bounds(count, owners)
    assert (len(bounds), bounds[0], bounds[-1]) == (owners + 1, 0, count)
    assert bounds == sorted(bounds)
    assert all(bound % 64 == 0 or bound == count for bound in bounds)


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
        own = StateLayout(segments, [adam] * len(specs)).nbytes
        assert own < whole * (1 / owners + 0.02)
