"""Backward passes that fill steps of two channels, in every order of events: nothing hangs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations_with_replacement

import pytest
from channel_model import ChannelModel
from model_rank import explore

from hvdtrain.core.gradients.step import BucketProgress, BucketVerdict

EXHAUSTIVE = os.environ.get("HVDTRAIN_TEST_EXHAUSTIVE") == "1"

# How many buckets of A's step, and of B's, a backward pass of a rank fills.
Filled = tuple[int, int]


def program(*passes: Filled, ends: str = "AB") -> str:
    words = []
    for counts in passes:
        for channel, number in enumerate(counts):
            letter = "AB"[channel]
            begun = f"{letter}s(" in words
            words += [f"{letter}s("] * (number > 0 and not begun) + [f"{letter}s+"] * number
        words += [f"{letter}s^" for letter in ends]
    for letter in "AB":
        words += [f"{letter}s("] * (f"{letter}s(" not in words) + [f"{letter}s)", f"{letter}s?"]
    return " ".join(words)


ONE = [(first, second) for first in range(3) for second in range(3)]
ALL = [
    (program(first), program(second, ends=ends))
    for first, second in combinations_with_replacement(ONE, 2)
    for ends in ("AB", "BA")
]
SOME = [
    (program((1, 2)), program((1, 1))),  # one rank alone uses a layer of B, and none one of A
    (program((1, 2)), program((2, 1), ends="BA")),
    (program((1, 0)), program((1, 2), ends="BA")),
    (program((1, 1), (0, 1)), program((1, 1))),
]
LONG = [
    (program((0, 0)), program((1, 2))),
    (program((1, 1), (0, 1)), program((1, 1), (1, 0), ends="BA")),
]


@pytest.mark.parametrize("ranks", ALL if EXHAUSTIVE else SOME, ids=" / ".join)
def test_steps_of_two_channels(ranks: Sequence[str]) -> None:
    seen = explore(ChannelModel(*ranks, channels="AB"))
    assert not seen.fault
    print(seen.states, "states")


@pytest.mark.soak
@pytest.mark.parametrize("ranks", LONG, ids=" / ".join)
def test_longer_steps_of_two_channels(ranks: Sequence[str]) -> None:
    assert not explore(ChannelModel(*ranks, channels="AB")).fault


def tells_nobody(own: BucketProgress, highest: Sequence[int]) -> BucketVerdict:
    """Go on waiting for a bucket that a rank has not filled."""
    return BucketVerdict(own.total - highest[0])


def calls_nobody(own: BucketProgress, highest: Sequence[int]) -> BucketVerdict:
    """Have backward() wait for no such bucket, but for those of other steps."""
    return VERDICT(own, highest)._replace(missed=False)


def runs_what_one_has_filled(own: BucketProgress, highest: Sequence[int]) -> BucketVerdict:
    return BucketVerdict(own.filled)


VERDICT = BucketProgress.verdict


@pytest.mark.parametrize("wrong", [tells_nobody, calls_nobody, runs_what_one_has_filled])
def test_a_wrong_verdict_is_found(wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BucketProgress, "verdict", wrong)
    assert any(explore(ChannelModel(*ranks, channels="AB")).fault for ranks in SOME)


def test_a_rank_that_votes_only_when_it_has_filled_a_bucket_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BucketProgress, "end_pass", lambda own: own)
    assert any(explore(ChannelModel(*ranks, channels="AB")).fault for ranks in SOME)
