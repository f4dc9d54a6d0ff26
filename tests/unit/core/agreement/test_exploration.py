"""The life of a channel in every order of events: nothing hangs, is lost, or outlives it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import combinations_with_replacement, product

import pytest
from channel_model import ChannelModel
from model_program import Transition
from model_rank import Explored, explore
from program_lists import END, may_desert, short
from wrong_rules import OF_A_CHANNEL

EXHAUSTIVE = os.environ.get("HVDTRAIN_TEST_EXHAUSTIVE") == "1"


def explored(*ranks: str, **how: object) -> Explored:
    """Explore these programs, and fail on a fault."""
    seen = explore(ChannelModel(*ranks, deserts=may_desert(ranks), **how))  # type: ignore[arg-type]
    assert not seen.fault, f"{ranks} {how}: {seen.fault}"
    return seen


# All of them are more than two million states.
SOME = [f"{part} {END}" for part in ("a", "a a?", "s(", "G G?", "join")] + [END]
FEW, MORE = short(1), short(2)
TRIPLES = product(FEW, repeat=3) if EXHAUSTIVE else combinations_with_replacement(SOME, 3)


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
