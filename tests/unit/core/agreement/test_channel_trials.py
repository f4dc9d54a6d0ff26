"""Random programs on real channels, over an engine that notes every primitive that mismatches.

HVDTRAIN_TRIALS=10000 plays so many of each kind; the number of a trial is in its message.
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import channel_trials
import pytest
from channel_trials import faulty_trial, sound_trial

from hvdtrain.core.agreement import channel, driver, lifecycle, queue, votes
from hvdtrain.core.agreement.lifecycle import Decision, Ending, Leave, Left, decide
from hvdtrain.core.agreement.operation import LEAVE, Operation

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


def _agree_on_the_first(*given: object) -> tuple[list[int], bool]:
    positions, done = VOTE(*given)  # type: ignore[arg-type]
    everything = list(range(len(given[1])))  # type: ignore[arg-type]
    return everything if positions else [], done


def _go_on(self: channel.Channel, error: BaseException) -> None:
    for operation in self.queue.operations():
        self.queue.end(operation, error)


def _admit_twice(self: queue.Queue, operation: Operation) -> bool:
    admitted = ADMIT(self, operation)
    if admitted:
        self.pending["its shadow"] = operation
    return admitted


VOTE, FOLLOW, ADMIT = votes.vote, driver.Driver.follow, queue.Queue.admit
# What may go wrong: the trials that find it, what is replaced, and by what.
MUTATIONS: dict[str, tuple[Trial, object, str, object]] = {
    "all leave as soon as one does": (sound_trial, lifecycle, "decide", _leave_early),
    "a rank leaves without failing what others did not submit": (
        *(sound_trial, driver.Driver, "_leave", _leave_with_leftovers),
    ),
    "the hash of the first request stands for all of them": (
        *(sound_trial, driver, "vote", _agree_on_the_first),
    ),
    "a rank that listens waits for ever": (
        *(sound_trial, queue.Queue, "call_listeners", lambda self, ranks: None),
    ),
    "an operation runs that not all propose": (
        *(sound_trial, driver.Driver, "follow"),
        lambda self, operation, _: FOLLOW(self, operation, operation.request.ballot * votes.HASHES),
    ),
    "an operation stays pending that is done": (
        *(sound_trial, queue.Queue, "admit", _admit_twice),
    ),
    "a channel closes without failing what is pending": (
        *(faulty_trial, queue.Queue, "fail", lambda self, actions: None),
    ),
    "a rank goes on after an engine call that has failed": (
        *(faulty_trial, channel.Channel, "_give_up", _go_on),
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
