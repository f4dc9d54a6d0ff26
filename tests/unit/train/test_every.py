"""Intervals of a run, as people write them."""

from __future__ import annotations

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.train.options.declare import Interval


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("5 steps", 5, "steps"),
        ("1 step", 1, "steps"),
        ("1 epoch", 1, "epochs"),
        (" 3  Epochs ", 3, "epochs"),
        ("30 seconds", 30, "seconds"),
        ("10 minutes", 600, "seconds"),
        ("2 hours", 7200, "seconds"),
        ("1.5 hours", 5400, "seconds"),
        ("0.5seconds", 0.5, "seconds"),
    ],
)
def test_parses_what_people_write(text: str, amount: float, unit: str) -> None:
    every = Interval.parse(text)
    assert (every.amount, every.unit) == (amount, unit)


@pytest.mark.parametrize(
    "text",
    [
        *("", "5", "steps", "0 steps", "-1 epoch", "1.5 steps", "0.5 epochs", "5 stepss"),
        *("nan hours", "3 weeks", "5 steps now", "1e3 steps", f"{'9' * 400} hours", "s", "5 s"),
    ],
)
def test_refuses_what_names_none(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Interval.parse(text, "--checkpoint-every")
    message = str(caught.value)
    assert message.startswith("--checkpoint-every must be")
    assert "'10 minutes'" in message
    assert repr(text) in message


def test_steps_and_epochs_are_counted_from_the_very_first_start() -> None:
    steps, epochs = Interval.parse("3 steps"), Interval.parse("2 epochs")
    assert [step for step in range(1, 10) if steps.after_step(step)] == [3, 6, 9]
    assert [epoch for epoch in range(1, 6) if epochs.after_epoch(epoch)] == [2, 4]
    assert not any(steps.after_epoch(n) or epochs.after_step(n) for n in range(1, 10))


def test_only_an_interval_of_time_has_seconds() -> None:
    assert Interval.parse("10 minutes").seconds == 600.0
    assert Interval.parse("10 steps").seconds is None
    assert not Interval.parse("1 second").after_step(1)
    assert not Interval.parse("1 second").after_epoch(1)
