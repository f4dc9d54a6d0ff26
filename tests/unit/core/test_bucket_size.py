"""The size of a bucket is a function of what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.config import DEFAULT_BUCKET_BYTES
from hvdtrain.core.gradients.bucket_size import choose_bucket_size, fit_cost

MIB = 1 << 20


def measured(latency_us: float, gigabytes: float) -> list[tuple[int, float]]:
    return [(n, latency_us * 1e-6 + n / gigabytes / 1e9) for n in (0, MIB, 4 * MIB)]


@pytest.mark.parametrize(
    ("latency_us", "gigabytes", "mib"),
    # 19 x latency x bandwidth is 2.7 MB, 0.04 MB, 9.5 MB, 190 MB and 5.7 MB.
    [(7, 20, 4), (20, 0.1, 1), (100, 5, 16), (1000, 10, 64), (300, 1, 8)],
)
def test_latency_is_a_twentieth(latency_us: float, gigabytes: float, mib: int) -> None:
    size = choose_bucket_size(measured(latency_us, gigabytes))
    assert size.nbytes == mib * MIB
    expected = f"measured: an all-reduce starts in {latency_us} us and runs at {gigabytes} GB/s"
    assert size.reason == expected


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


def test_a_fit_follows_the_largest_sizes() -> None:
    cost = fit_cost([(1000, 1e-5), (10**6, 1e-3 + 1e-5), (10**7, 5e-3 + 1e-5)])
    assert cost.latency_seconds == 1e-5
    assert cost.bytes_per_second == pytest.approx(2e9, rel=0.02)
