"""Ranks die in every order of events: those that are left go on, and nothing hangs or is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import combinations_with_replacement, product

import pytest
from model_losses import WRONG_MODELS, LossModel, Processes, Stage
from model_program import Transition
from model_rank import explore
from program_lists import END, may_desert, short
from wrong_rules import OF_LOSSES

from hvdtrain.core.agreement.lifecycle import transition

EXHAUSTIVE = os.environ.get("HVDTRAIN_TEST_EXHAUSTIVE") == "1"

# Some in other orders on each rank, and with a rank that answers for others.
LONG = [
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
LONG_TRIPLES = [
    ("a b a? b? leave close", "b a b? a? leave close", "a b leave close"),
    ("a join leave close", "join leave close", "a a? b b? join leave close"),
    ("s( s+ leave close", "s( s) s? leave close", "s( leave close"),
]
SOME = [f"{part} {END}" for part in ("a a?", "join")] + [END]


def explored(*ranks: str, threads: bool = True) -> int:
    """Explore these programs, and fail on a fault; return how many states there are.

    A rank that waits for another one is freed by its death. So that this hides no fault, each
    number of deaths is explored by itself.
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


def test_two_ranks() -> None:
    all_pairs = product(short(2), repeat=2)
    pairs = matching(all_pairs if EXHAUSTIVE else combinations_with_replacement(short(1), 2))
    print(sum(explored(*pair) for pair in pairs), "states")


def test_three_ranks() -> None:
    triples = matching(combinations_with_replacement(short(1) if EXHAUSTIVE else SOME, 3))
    print(sum(explored(*triple) for triple in triples), "states")


@pytest.mark.parametrize("ranks", [*LONG, *ASKED], ids=" / ".join)
def test_longer_programs(ranks: tuple[str, ...]) -> None:
    print(explored(*ranks) + explored(*ranks, threads=False), "states")


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [*LONG_TRIPLES, (END,) * 4], ids=" / ".join)
def test_longer_programs_of_more_ranks(ranks: tuple[str, ...]) -> None:
    print(explored(*ranks) + explored(*ranks, threads=False), "states")


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


def is_found(rules: Transition = transition) -> bool:
    programs = *ASKED, (END,) * 3, *LONG
    return any(
        explore(LossModel(*ranks, deaths=deaths, rules=rules)).fault
        for ranks in programs
        for deaths in range(len(ranks))
    )


@pytest.mark.parametrize("wrong", WRONG_MODELS.values(), ids=WRONG_MODELS)
def test_a_wrong_model_is_found(
    wrong: Mapping[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, instead in wrong.items():
        monkeypatch.setattr(LossModel, name, instead)
    assert is_found()


@pytest.mark.parametrize("rules", OF_LOSSES)
def test_a_wrong_rule_is_found(rules: Transition) -> None:
    assert is_found(rules)
