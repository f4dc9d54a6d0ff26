"""The life of channels in every order of events: nothing hangs or is lost."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, product

import pytest
from channel_model import END, ChannelModel, Explored, explore, may_desert, short
from model_rank import Result, Transition, believes_one_rank

from hvdtrain.core.agreement import lifecycle
from hvdtrain.core.gradients import reducer
from hvdtrain.core.gradients.step import BucketProgress, BucketVerdict

EXHAUSTIVE = os.environ.get("HVDTRAIN_TEST_EXHAUSTIVE") == "1"


def explored(*ranks: str, **how: object) -> Explored:
    seen = explore(ChannelModel(*ranks, deserts=may_desert(ranks), **how))  # type: ignore[arg-type]
    assert not seen.fault, f"{ranks} {how}: {seen.fault}"
    return seen


# All of them are more than two million states.
SOME = [f"{part} {END}" for part in ("a", "a a?", "s(", "G G?", "join")] + [END]
FEW, MORE = short(1), short(2)
TRIPLES = [*(product(FEW, repeat=3) if EXHAUSTIVE else combinations_with_replacement(SOME, 3))]


@pytest.mark.parametrize(
    "first", [MORE[::8], pytest.param(MORE, marks=pytest.mark.soak)], ids=["some", "all"]
)
def test_two_ranks(first: list[str]) -> None:
    pairs = product(first, MORE if EXHAUSTIVE else FEW)
    print(sum(explored(*pair).states for pair in pairs), "states")


def test_two_ranks_without_threads() -> None:
    pairs = product(MORE, MORE) if EXHAUSTIVE else product(FEW, FEW)
    print(sum(explored(*pair, threads=False).states for pair in pairs), "states")


def test_three_ranks() -> None:
    print(sum(explored(*ranks).states for ranks in TRIPLES), "states")


# Three operations, in other orders on each rank, sound and unsound.
LONG = [
    ("a b s( s) a? b? s? leave close", "s( b a s) s? b? a? leave close"),
    ("a s( join leave close", "b join leave close"),
    ("s( s+ a s) s? leave close", "a s~( s) s? a? leave close"),
    ("s( s+ leave close", "s( s) s? leave close", "s( s) s? join leave close"),
    ("b leaving a leave close", "b b? leave close"),
    ("joining a join leave close", "a~ join leave close"),
    ("a joining leaving join leave close", "join leave close"),
    ("a b join c~ c? leave close", "join c leave close"),
    ("a a? joining leaving b join leave close", "a join leave close"),
    ("a listen b b? deaf a? leave close", "b b? a a? leave close"),
    ("a b a? b? leave close", "b a b? a? leave close", "a b leave close"),
    ("a join leave close", "join leave close", "a a? b b? join leave close"),
]
# More states than all of these.
LONGEST = ("a s( leave close", "s( s) b leave close", "a b leave close")


@pytest.mark.parametrize(
    "ranks", [*LONG, pytest.param(LONGEST, marks=pytest.mark.soak)], ids=" / ".join
)
def test_longer_programs(ranks: tuple[str, ...]) -> None:
    seen = [explored(*ranks), explored(*ranks, threads=False)]
    seen += [explored(*ranks, failing=member) for member in range(len(ranks))]
    print(sum(one.states for one in seen), "states")


def leaves_at_once(state: lifecycle.ChannelState, event: lifecycle.Event) -> Result:
    state, actions = lifecycle.transition(state, event)
    return state, tuple(
        lifecycle.Leave({}) if isinstance(a, lifecycle.Leave) else a for a in actions
    )


def forgets_that_ranks_are_lost(state: lifecycle.ChannelState, event: lifecycle.Event) -> Result:
    return lifecycle.transition(
        state, replace(event, lost=False) if isinstance(event, lifecycle.Failed) else event
    )


@pytest.mark.parametrize("rules", [leaves_at_once, believes_one_rank, forgets_that_ranks_are_lost])
def test_a_wrong_rule_is_found(rules: Transition) -> None:
    def faults() -> Iterator[str]:
        for ranks in (*LONG, *product(SOME, SOME)):
            deserts = may_desert(ranks)
            yield explore(ChannelModel(*ranks, deserts=deserts, rules=rules)).fault
            yield explore(ChannelModel(*ranks, deserts=deserts, failing=0, rules=rules)).fault

    assert any(faults())


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
ALL_STEPS = [
    (program(first), program(second, ends=ends))
    for first, second in combinations_with_replacement(ONE, 2)
    for ends in ("AB", "BA")
]
STEPS = [
    (program((1, 2)), program((1, 1))),  # one rank alone uses a layer of B, and none one of A
    (program((1, 2)), program((2, 1), ends="BA")),
    (program((1, 0)), program((1, 2), ends="BA")),
    (program((1, 1), (0, 1)), program((1, 1))),
]
LONG_STEPS = [
    (program((0, 0)), program((1, 2))),
    (program((1, 1), (0, 1)), program((1, 1), (1, 0), ends="BA")),
]


@pytest.mark.parametrize(
    "ranks",
    [
        *(ALL_STEPS if EXHAUSTIVE else STEPS),
        *(pytest.param(ranks, marks=pytest.mark.soak) for ranks in LONG_STEPS),
    ],
    ids=" / ".join,
)
def test_steps_of_two_channels(ranks: Sequence[str]) -> None:
    seen = explore(ChannelModel(*ranks, channels="AB"))
    assert not seen.fault
    print(seen.states, "states")


# Channel A, of the step, has ranks 0 and 1, and B has all.
PAIR: dict[str, tuple[int, ...]] = {"A": (0, 1), "B": (0, 1, 2)}
OUTSIDERS: list[tuple[dict[str, tuple[int, ...]], list[str]]] = [
    # Rank 2 waits for members, of which none waits for it.
    (PAIR, [*["As( As+ As+ As^ As! As) As? Bb Bb?"] * 2, "Bb Bb?"]),
    # Rank 1 waits for rank 2 before it fills a bucket, and rank 2 for rank 0: both in B,
    (PAIR, ["Bb As( As+ As^ Bc Bc? Bb? As) As?", "Bc Bb Bb? As( As) As? Bc?", "Bc Bc? Bb Bb?"]),
    # one where rank 0 does not hear it, the other in B,
    (
        {**PAIR, "C": (1, 2)},
        ["As( As+ As^ Bb Bb? As) As?", "Bb Cc Cc? As( As) As? Bb?", "Bb Bb? Cc Cc?"],
    ),
    # and one in B, whose rounds lack rank 2 meanwhile.
    (
        {**PAIR, "C": (0, 2)},
        ["As( As+ As^ Cc Cc? Bb As) As? Bb?", "Bb Bb? As( As) As?", "Cc Cc? Bb Bb?"],
    ),
]


@pytest.mark.parametrize(("sets", "ranks"), OUTSIDERS)
def test_steps_of_a_process_set(sets: dict[str, tuple[int, ...]], ranks: list[str]) -> None:
    assert not explore(ChannelModel(*ranks, channels="".join(sets), sets=sets)).fault


@pytest.mark.parametrize("wrong", [{0, 1}, {0, 1, 2}], ids=["members only", "everyone"])
def test_a_rank_that_listens_for_the_wrong_ranks_is_found(
    wrong: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reducer, "linked", lambda ranks, groups: wrong)
    models = [ChannelModel(*of, channels="".join(sets), sets=sets) for sets, of in OUTSIDERS]
    assert any(explore(model).fault for model in models)


def test_a_wrong_verdict_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks go on waiting for a bucket that one of them has not filled."""

    def tells_nobody(own: BucketProgress, highest: Sequence[int]) -> BucketVerdict:
        return BucketVerdict(own.total - highest[0])

    monkeypatch.setattr(BucketProgress, "verdict", tells_nobody)
    assert any(explore(ChannelModel(*ranks, channels="AB")).fault for ranks in STEPS)
