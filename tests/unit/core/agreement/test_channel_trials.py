"""Random programs on real channels, over an engine that notes every primitive that mismatches.

HVDTRAIN_TRIALS=10000 plays so many of each kind; the number of a trial is in its message.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import channel_trials
import pytest
from channel_trials import faulty_trial, sound_trial

from hvdtrain.core.agreement import driver, lifecycle, queue
from hvdtrain.core.agreement.decision import Decision, Ending, Leave, Left, decide
from hvdtrain.core.agreement.request import LEAVE
from hvdtrain.core.agreement.votes import unanimous
from hvdtrain.engines.features import Verdict

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


def _leave_early(*given: object) -> Decision:
    decision = decide(*given)  # type: ignore[arg-type]
    left = any(LEAVE in report.requests for report in given[0])  # type: ignore[attr-defined]
    return replace(decision, ending=Ending.LEAVE) if left else decision


def _leave_with_leftovers(self: driver.Driver, action: Leave) -> Left:
    operation = self._own.get(LEAVE.key)
    if operation is not None:
        self._queue.end(operation)
    return Left()


def _agree_on_the_first(communicator: object, requests: object) -> list[int]:
    agreed = unanimous(communicator, requests)  # type: ignore[arg-type]
    return list(range(len(requests))) if agreed else []  # type: ignore[arg-type]


def _go_on(self: driver.Driving, error: BaseException) -> None:
    for operation in self._queue.operations():
        self._queue.end(operation, error)


FOLLOW = driver.Driver.follow
# What may go wrong: the trials that find it, what is replaced, and by what.
MUTATIONS: dict[str, tuple[Trial, object, str, object]] = {
    "all leave as soon as one does": (sound_trial, lifecycle, "decide", _leave_early),
    "a rank leaves without failing what others did not submit": (
        *(sound_trial, driver.Driver, "_leave", _leave_with_leftovers),
    ),
    "the hash of the first request stands for all of them": (
        *(sound_trial, driver, "unanimous", _agree_on_the_first),
    ),
    "a rank that listens waits for ever": (
        *(sound_trial, queue.Queue, "call_listeners", lambda self, ranks: None),
    ),
    "a prepared operation runs that not all propose": (
        *(sound_trial, driver.Driver, "follow"),
        lambda self, operation, verdict: FOLLOW(self, operation, Verdict.AGREED),
    ),
    "a prepared operation stays pending that is done": (
        *(sound_trial, queue.Queue, "settle", lambda self, prepared: None),
    ),
    "a channel closes without failing what is pending": (
        *(faulty_trial, queue.Queue, "fail", lambda self, actions: None),
    ),
    "a rank goes on after an engine call that has failed": (
        *(faulty_trial, driver.Driving, "_give_up", _go_on),
    ),
}


@pytest.mark.parametrize(("trial", "owner", "name", "wrong"), MUTATIONS.values(), ids=MUTATIONS)
def test_they_find(
    trial: Trial, owner: object, name: str, wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    # A trial may hang now, and that is a finding, too.
    monkeypatch.setattr(channel_trials, "HANG_SECONDS", 1.0)
    assert any(failures(trial, range(300)))
