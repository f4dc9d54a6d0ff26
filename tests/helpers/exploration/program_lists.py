"""All short programs of a model's ranks, and whether some fit each other."""

from collections.abc import Iterator, Sequence
from itertools import permutations

# What a program does with one operation; those of one name are never in one program.
PARTS = (*("a", "a a?", "a~", "b b?", "G", "G G?"), *("s( s)", "s( s) s?", "s(", "join", "listen"))
END = "leave close"
NAMES = set("abcGs")


def programs(parts: int) -> Iterator[str]:
    for chosen in permutations(PARTS, parts):
        names = [part[0] for part in chosen]
        # The thread that fills a step does not wait for anything else meanwhile.
        after = " ".join(chosen).partition("s( ")[2]
        if len(set(names)) == len(names) and ("?" not in after or after.startswith("s)")):
            yield " ".join([*chosen, END])


def may_desert(ranks: Sequence[str]) -> bool:
    """Return whether a program waits for something that another one never submits."""
    for waiting, other in permutations([program.split() for program in ranks], 2):
        waits = {word.rstrip("?") for word in waiting if word.endswith("?") or word == "join"}
        if not waits <= {word.rstrip("(~") for word in other}:
            return True
    # What one rank submits before it joins, and another after it, are two operations.
    sides = [program.partition("join")[::2] for program in ranks]
    return any(
        {word[0] for word in before.split()} & {word[0] for word in after.split()} & NAMES
        for (before, _), (_, after) in permutations(sides, 2)
    )


def short(most: int) -> list[str]:
    return [program for parts in range(most + 1) for program in programs(parts)]
