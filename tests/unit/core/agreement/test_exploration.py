"""The life of channels in every order of events, deaths too: nothing hangs or is lost."""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations_with_replacement, product

import pytest
from channel_model import ChannelModel
from model_losses import WRONG_MODELS, LossModel, Processes, Stage
from model_program import Transition
from model_rank import Explored, explore
from program_lists import END, may_desert, short
from wrong_rules import OF_A_CHANNEL, OF_LOSSES

from hvdtrain.core.agreement.lifecycle import transition
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


@pytest.mark.parametrize("rules", OF_A_CHANNEL)
def test_a_wrong_rule_is_found(rules: Transition) -> None:
    def faults() -> Iterator[str]:
        for ranks in (*LONG, *product(SOME, SOME)):
            deserts = may_desert(ranks)
            yield explore(ChannelModel(*ranks, deserts=deserts, rules=rules)).fault
            yield explore(ChannelModel(*ranks, deserts=deserts, failing=0, rules=rules)).fault

    assert any(faults())


# Some in other orders on each rank, and with a rank that answers for others.
SURVIVED = [
    ("a a? b b? leave close", "a b b? a? leave close"),
    ("a b leave close", "b a a? leave close"),
    ("a a? leave close", "a~ a? leave close"),
    ("a a? join leave close", "join leave close"),
    ("a join b b? leave close", "join b leave close"),
    ("s( s) s? leave close", "s( s+ leave close"),
    ("s( a s) a? s? leave close", "a s( s) s? a? leave close"),
    ("listen a a? leave close", "a a? deaf leave close"),
]
# All go on in the next world without a death, as when a rank leaves or joins.
ASKED = [
    ("a recover | a a? leave close", "recover | a a? leave close"),
    ("s( recover | s( s) s? leave close", "s( s) recover | s( leave close"),
    ("join recover | join leave close", "recover | join leave close"),
    ("a recover | a a? leave close", "recover | a leave close", "recover | a a? leave close"),
]
SURVIVED_BY_THREE = [
    ("a b a? b? leave close", "b a b? a? leave close", "a b leave close"),
    ("a join leave close", "join leave close", "a a? b b? join leave close"),
    ("s( s+ leave close", "s( s) s? leave close", "s( leave close"),
]
ENDS = [f"{part} {END}" for part in ("a a?", "join")] + [END]


def explored_with_deaths(*ranks: str, threads: bool = True) -> int:
    """Explore these programs, and fail on a fault; return how many states there are.

    A rank that waits for another one is freed by its death. So that this hides no fault, each
    number of deaths is explored_with_deaths by itself.
    """
    states = 0
    for deaths in range(len(ranks)):
        seen = explore(LossModel(*ranks, deaths=deaths, threads=threads))
        assert not seen.fault, f"{ranks}, {deaths} die: {seen.fault}"
        states += seen.states
    return states


def matching(chosen: Iterator[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return those programs of which none waits for what another one never submits."""
    return [ranks for ranks in chosen if not may_desert(ranks)]


def test_deaths_of_two_ranks() -> None:
    all_pairs = product(short(2), repeat=2)
    pairs = matching(all_pairs if EXHAUSTIVE else combinations_with_replacement(short(1), 2))
    print(sum(explored_with_deaths(*pair) for pair in pairs), "states")


def test_deaths_of_three_ranks() -> None:
    triples = matching(combinations_with_replacement(short(1) if EXHAUSTIVE else ENDS, 3))
    print(sum(explored_with_deaths(*triple) for triple in triples), "states")


@pytest.mark.parametrize("ranks", [*SURVIVED, *ASKED], ids=" / ".join)
def test_deaths_in_longer_programs(ranks: tuple[str, ...]) -> None:
    print(explored_with_deaths(*ranks) + explored_with_deaths(*ranks, threads=False), "states")


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [*SURVIVED_BY_THREE, (END,) * 4], ids=" / ".join)
def test_deaths_in_longer_programs_of_more_ranks(ranks: tuple[str, ...]) -> None:
    print(explored_with_deaths(*ranks) + explored_with_deaths(*ranks, threads=False), "states")


class Watched(LossModel):
    """Notes what happens."""

    def __init__(self, *programs: str, deaths: int) -> None:
        super().__init__(*programs, deaths=deaths)
        self.seen: set[str] = set()

    def moves(self, state: Processes) -> Iterator[tuple[str, Processes]]:
        for move, after in super().moves(state):
            self.seen.add(move)
            stages = {process.stage for process in after.all}
            if {Stage.OVER, Stage.OPENING, Stage.DEAD} <= stages:
                self.seen.add("one is through, and another one goes on")
            opening = [process for process in after.all if process.stage is Stage.OPENING]
            if any(process.broken for process in opening):
                self.seen.add("a rank dies while the next world opens")
            yield move, after


def test_what_can_happen_does() -> None:
    model = Watched("listen a leave close", "a a? leave close", "a a? leave close", deaths=2)
    assert not explore(model).fault
    assert model.seen >= {
        *("0: dies", "1: call fails", "1: goes on", "2: closes"),
        *("0: a tells", "1: a? tells", "0: leave tells", "1: leave? tells"),
        *("the world shrinks", "the world opens", "a rank dies while the next world opens"),
        "one is through, and another one goes on",
    }


def is_found_by_deaths(rules: Transition = transition) -> bool:
    return any(
        explore(LossModel(*ranks, deaths=deaths, rules=rules)).fault
        for ranks in (*ASKED, (END,) * 3, *SURVIVED)
        for deaths in range(len(ranks))
    )


@pytest.mark.parametrize("wrong", WRONG_MODELS.values(), ids=WRONG_MODELS)
def test_a_wrong_model_is_found(
    wrong: Mapping[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, instead in wrong.items():
        monkeypatch.setattr(LossModel, name, instead)
    assert is_found_by_deaths()


@pytest.mark.parametrize("rules", OF_LOSSES)
def test_a_wrong_rule_about_losses_is_found(rules: Transition) -> None:
    assert is_found_by_deaths(rules)


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


@pytest.mark.parametrize("ranks", ALL_STEPS if EXHAUSTIVE else STEPS, ids=" / ".join)
def test_steps_of_two_channels(ranks: Sequence[str]) -> None:
    seen = explore(ChannelModel(*ranks, channels="AB"))
    assert not seen.fault
    print(seen.states, "states")


@pytest.mark.soak
@pytest.mark.parametrize("ranks", LONG_STEPS, ids=" / ".join)
def test_longer_steps_of_two_channels(ranks: Sequence[str]) -> None:
    assert not explore(ChannelModel(*ranks, channels="AB")).fault


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
    assert any(explore(ChannelModel(*ranks, channels="AB")).fault for ranks in STEPS)


def test_a_rank_that_votes_only_when_it_has_filled_a_bucket_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BucketProgress, "end_pass", lambda own: own)
    assert any(explore(ChannelModel(*ranks, channels="AB")).fault for ranks in STEPS)
