"""Threads change places sooner while this process is a rank, and as the program says after."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import pytest

from hvdtrain.core import context
from hvdtrain.core.process.tuning import LONGEST_SWITCH_SECONDS

# Python keeps whole microseconds.
about = partial(pytest.approx, abs=2e-6)


@pytest.fixture(autouse=True)
def the_interval_of_before() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("before", [0.005, 0.0001])
def test_while_this_is_a_rank(before: float) -> None:
    sys.setswitchinterval(before)
    context.init("local")
    assert sys.getswitchinterval() == pytest.approx(min(before, LONGEST_SWITCH_SECONDS), rel=0.02)
    context.shutdown()
    assert sys.getswitchinterval() == about(before)


def test_what_the_program_has_chosen_stays() -> None:
    context.init("local")
    sys.setswitchinterval(0.002)
    context.shutdown()
    assert sys.getswitchinterval() == about(0.002)
