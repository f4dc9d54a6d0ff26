"""A model of ranks that have several channels, of which each has its own driver.

A program is as in model_program.py, with the letter of a channel before each word: "As( As+ As^".
At the end of a backward pass, a rank takes part in the rounds of its other channels meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from model_program import RankModel
from model_rank import Fault, Rank, end_pass, names_of

from hvdtrain.core.agreement.decision import ChannelState

# What there is on each rank, in each channel; a rank's program is at the same word in all.
World: TypeAlias = tuple[tuple[Rank, ...], ...]

_OF_ANOTHER = "another channel's"


class ChannelsModel:
    """The ranks of some channels, each with a program."""

    def __init__(self, *programs: str) -> None:
        self._one = RankModel()
        self._words = [program.split() for program in programs]
        letters = sorted({word[0] for words in self._words for word in words})
        self._of = [
            [[w[1:] if w[0] == letter else _OF_ANOTHER for w in words] for letter in letters]
            for words in self._words
        ]
        self._letters = letters

    def first(self) -> World:
        """Return the ranks before they have done anything."""
        rank = Rank(life=ChannelState(len(self._words)))
        return tuple((rank,) * len(self._letters) for _ in self._words)

    def is_end(self, world: World) -> bool:
        """Return whether every program has ended; see that nothing is left."""
        for words, own in zip(self._words, world, strict=True):
            if own[0].place < len(words):
                return False
            left = [name for rank in own if (name := names_of(rank.pending))]
            if left:
                raise Fault(f"a program ends with {', '.join(left)} pending")
        return True

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        """Return what programs, drivers and the engine can do."""
        for number, own in enumerate(world):
            for move, after in self._program(number, own):
                yield f"{number}: {move}", (*world[:number], after, *world[number + 1 :])
            for channel, rank in enumerate(own):
                for move, changed in self._one.driver(self._of[number][channel], rank):
                    after = (*own[:channel], changed, *own[channel + 1 :])
                    name = f"{number}: {self._letters[channel]} {move}"
                    yield name, (*world[:number], after, *world[number + 1 :])
        for channel, letter in enumerate(self._letters):
            for move, ranks in self._one.meet([own[channel] for own in world]):
                pairs = zip(world, ranks, strict=True)
                met = tuple((*own[:channel], r, *own[channel + 1 :]) for own, r in pairs)
                yield f"{letter} {move}", met

    def _program(
        self, number: int, own: tuple[Rank, ...]
    ) -> Iterator[tuple[str, tuple[Rank, ...]]]:
        words = self._words[number]
        place = own[0].place
        if place == len(words):
            return
        letter = words[place][0]
        channel = self._letters.index(letter)
        rank = own[channel]._replace(called=any(rank.called for rank in own))
        for move, after in self._one.program(self._of[number][channel], rank):
            ends, listens = after.at_end and not rank.at_end, after.at_end
            others = [
                (end_pass(rank) if ends else rank)._replace(
                    place=after.place, listening=listens, called=after.called
                )
                for rank in own
            ]
            yield f"{letter} {move}", (*others[:channel], after, *others[channel + 1 :])
