"""Whether the programs of a model wait for each other, for which nobody else is to blame. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from model_program import Words, awaited
from model_rank import WORDS, Rank, is_pending, name_of

from hvdtrain.core.agreement.request import JOIN, LEAVE


def is_stalled(programs: Sequence[Words], ranks: Sequence[Rank]) -> bool:
    """Return whether every rank waits for one that never comes, which the stall watch reports.

    Their programs are to blame where each rank waits for something that another one, which waits as
    well, has not submitted and cannot be without.
    """
    waits = list(map(awaited, programs, ranks))
    if not all(waits):
        return False
    return all(any(_is_missing(name, other) for other in ranks) for name in waits)


def _is_missing(name: str, rank: Rank) -> bool:
    if name in dict(rank.steps) and not dict(rank.steps)[name].complete:
        return True
    submitted = name in dict(rank.ended) or any(name_of(own) == name for own in rank.pending)
    joined = is_pending(rank, JOIN) and not name.isupper() and name not in WORDS
    left = is_pending(rank, LEAVE)
    return not (submitted or joined or left)
