"""Random programs on real channels, over an engine that notes every primitive that mismatches.

HVDTRAIN_TRIALS=10000 plays so many of each kind; the number of a trial is in its message.
"""

import os
import sys
from collections.abc import Callable, Iterator

import channel_trials
import pytest
from channel_trials import faulty_trial, sound_trial

from hvdtrain.core.agreement import queue

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


# What may go wrong: the trials that find it, what is replaced, and by what.
MUTATIONS: dict[str, tuple[Trial, type, str, object]] = {
    "a rank that listens waits for ever": (
        *(sound_trial, queue.Queue, "call_listeners", lambda self, ranks: None),
    ),
    "a channel closes without failing what is pending": (
        *(faulty_trial, queue.Queue, "fail", lambda self, actions: None),
    ),
}


@pytest.mark.parametrize(("trial", "owner", "name", "wrong"), MUTATIONS.values(), ids=MUTATIONS)
def test_they_find(
    trial: Trial, owner: type, name: str, wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    # A trial may hang now, and that is a finding, too.
    monkeypatch.setattr(channel_trials, "HANG_SECONDS", 1.0)
    assert any(failures(trial, range(300)))
