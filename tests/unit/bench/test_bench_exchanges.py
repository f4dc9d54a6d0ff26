"""How long turns of exchanges are, and what is said of their losses."""

from __future__ import annotations

import pytest
from hvdtrain_bench.analysis.losses import Curve, compare_losses
from hvdtrain_bench.harness.settings import period_of, turn_steps


@pytest.mark.parametrize(
    ("exchange", "period", "of_at_least_ten"),
    [
        ("average", 1, 10),
        ("nbit:bits=1", 1, 10),
        ("local:steps=8", 8, 16),
        ("local:state=reset,steps=5", 5, 10),
        ("postlocal:after=3,steps=4", 4, 12),
        ("blockmomentum:block=4096", 1, 10),
        ("diloco:rate=0.5", 500, 500),
    ],
)
def test_turns_are_whole_periods(exchange: str, period: int, of_at_least_ten: int) -> None:
    assert period_of(exchange) == period
    assert turn_steps(exchange, 10) == of_at_least_ten


def curve(seconds: float, *losses: float) -> Curve:
    return [(10 * number, seconds * number, loss) for number, loss in enumerate(losses)]


def test_losses_are_compared_with_those_of_the_base() -> None:
    curves = {
        "average": [curve(2.0, 5.0, 3.0, 1.0), curve(2.0, 5.0, 3.0, 2.0)],
        "alike": [curve(1.0, 5.0, 4.0, 1.2), curve(1.0, 5.0, 4.0, 2.2)],
        "worse": [curve(4.0, 5.0, 4.0, 2.5), curve(4.0, 5.0, 4.0, 1.9)],
        "better": [curve(4.0, 5.0, 4.0, 0.5), curve(4.0, 5.0, 4.0, 1.0)],
    }
    shortest, found = compare_losses(curves, "average")
    assert shortest == 2.0
    assert [summary.name for summary in found] == list(curves)
    assert [summary.verdict for summary in found] == ["", "within the seeds", "higher", "lower"]
    assert [summary.mean for summary in found] == pytest.approx([1.5, 1.7, 2.2, 0.75])
    assert [summary.difference for summary in found] == pytest.approx([0.0, 0.2, 0.7, -0.75])
    assert [summary.equal_time for summary in found] == pytest.approx([3.0, 1.7, 4.5, 4.5])
    assert [summary.seconds for summary in found] == [4.0, 2.0, 8.0, 8.0]
    assert (found[1].low, found[1].high) == (1.2, 2.2)
