"""Random programs on real channels, over an engine that notes every primitive that mismatches.

HVDTRAIN_TRIALS=10000 plays so many of each kind; the number of a trial is in its message.
"""

import os
import sys
from collections.abc import Callable, Iterator

import pytest
from channel_trials import faulty_trial, sound_trial

Trial = Callable[[int], list[str]]

GIVEN = os.environ.get("HVDTRAIN_TRIALS")


@pytest.fixture(autouse=True)
def _quick_switches() -> Iterator[None]:
    """Have threads change places often, in many an order."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(50e-6)
    yield
    sys.setswitchinterval(before)


def failures(trial: Trial, numbers: range) -> Iterator[list[str]]:
    return filter(None, map(trial, numbers))


@pytest.mark.parametrize(
    ("trial", "numbers"),
    [
        (sound_trial, range(int(GIVEN or 200))),
        (faulty_trial, range(int(GIVEN or 150))),
        pytest.param(sound_trial, range(200, 1400), marks=pytest.mark.soak),
        pytest.param(faulty_trial, range(150, 1000), marks=pytest.mark.soak),
    ],
    ids=["sound", "faulty", "sound, more", "faulty, more"],
)
def test_random_programs(trial: Trial, numbers: range) -> None:
    wrong = next(failures(trial, numbers), None)
    assert wrong is None, "\n".join(wrong or ())
