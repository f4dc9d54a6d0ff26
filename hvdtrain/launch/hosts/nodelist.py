"""Host lists with ranges, as Slurm and Flux write them: `node[01-04,07],login`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby, product

from hvdtrain.launch.hosts.host import HostfileError, check_name, check_slots

_MOST_OF_A_RANGE = 65_536
_BRACKET = re.compile(r"\[([^][]*)\]")
_COUNT = re.compile(r"(\d{1,8})(?:\(x(\d{1,8})\))?")
_NUMBERED = re.compile(r"(.*?)(\d{1,9})")


def expand(text: str, where: str) -> list[str]:
    """Return the names of a list: n[1-2]a[0,3] is n1a0, n1a3, n2a0, n2a3."""
    names: list[str] = []
    for part in _split(text, where):
        pieces = _BRACKET.split(part)
        choices = [
            _range(piece, part, where) if number % 2 else [piece]
            for number, piece in enumerate(pieces)
        ]
        total = 1
        for choice in choices:
            total *= len(choice)
        if total > _MOST_OF_A_RANGE:
            raise HostfileError(where, part, f"is more than {_MOST_OF_A_RANGE} hosts")
        names += [check_name("".join(words), where) for words in product(*choices)]
    return names


def compress(names: Sequence[str]) -> str:
    """Return a host list that expand() reads back, with ranges for consecutive names."""
    return ",".join(_compressed(names))


def expand_counts(text: str, where: str) -> list[int]:
    """Return the numbers of a Slurm count list: 2(x3),1 is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise HostfileError(where, part, "is not a number of tasks: write it as in 2(x3),1")
        repeats = int(match[2] or 1)
        if len(counts) + repeats > _MOST_OF_A_RANGE:
            raise HostfileError(where, part, f"is more than {_MOST_OF_A_RANGE} hosts")
        counts += [check_slots(match[1], where, part)] * repeats
    return counts


def compress_counts(counts: Sequence[int]) -> str:
    """Return numbers as a Slurm count list."""
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    return ",".join(f"{count}(x{length})" if length > 1 else str(count) for count, length in runs)


def _split(text: str, where: str) -> list[str]:
    """Split at the commas outside of brackets."""
    parts, depth = [""], 0
    for letter in text.strip():
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise HostfileError(where, text[:80], "has unbalanced brackets")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise HostfileError(where, parts[-1][:80], "has a bracket that is not closed: write ]")
    if not all(parts):
        raise HostfileError(where, text[:80], "has nothing between two commas")
    return parts


def _range(text: str, part: str, where: str) -> list[str]:
    names: list[str] = []
    for piece in text.split(","):
        low, dash, high = piece.partition("-")
        high = high if dash else low
        if not (low.isascii() and low.isdecimal() and high.isascii() and high.isdecimal()):
            raise HostfileError(
                where, part[:80], f"{piece!r} is not a range: write it as in [01-04,07]"
            )
        if max(len(low), len(high)) > 9:
            raise HostfileError(where, part[:80], f"{piece!r} has too many digits")
        first, last = int(low), int(high)
        if last < first:
            raise HostfileError(where, part[:80], f"{piece!r} runs backwards: write [{high}-{low}]")
        if last - first + len(names) >= _MOST_OF_A_RANGE:
            raise HostfileError(where, part[:80], f"is more than {_MOST_OF_A_RANGE} hosts")
        names += [str(number).zfill(len(low)) for number in range(first, last + 1)]
    return names


def _compressed(names: Sequence[str]) -> Iterator[str]:
    start = 0
    while start < len(names):
        end = start + 1
        while end < len(names) and names[end] == _successor(names[end - 1]):
            end += 1
        if end - start == 1:
            yield names[start]
        else:
            first, last = _NUMBERED.fullmatch(names[start]), _NUMBERED.fullmatch(names[end - 1])
            assert first is not None
            assert last is not None
            yield f"{first[1]}[{first[2]}-{last[2]}]"
        start = end


def _successor(name: str) -> str:
    """Return the next name of a range with the same number of digits, or ""."""
    match = _NUMBERED.fullmatch(name)
    if match is None:
        return ""
    number = str(int(match[2]) + 1).zfill(len(match[2]))
    return match[1] + number if len(number) == len(match[2]) else ""
