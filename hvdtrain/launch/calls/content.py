"""What a caller sends to the ranks that call its function, and what it makes of their answers."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch.calls.called_rank import Answer


def dumps_call(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
    caller: str,
) -> bytes:
    """Pickle a call for called_rank, with classes and functions that only this process has."""
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        raise UsageError(f"{caller} needs cloudpickle: pip install cloudpickle") from None
    # Ranks need this process's module path before they unpickle the call.
    call = cloudpickle.dumps((function, tuple(args), dict(kwargs or {})))
    return pickle.dumps((sys.path, call))


def results_of(arrived: Sequence[Answer], np: int, caller: str, cause: str) -> list[Any]:
    """Return the results, ordered by rank."""
    for answer in arrived:  # the first one is the cause: other ranks fail because it did
        if answer.failure:
            raise _error(answer, np, caller)
    results = {answer.rank: pickle.loads(answer.content) for answer in arrived}
    missing = [str(rank) for rank in range(np) if rank not in results]
    if missing:
        raise HvdtrainError(
            f"{caller}: rank {', '.join(missing)} of {np} ended without a result ({cause}): see "
            "what it printed"
        )
    return [results[rank] for rank in range(np)]


def _error(answer: Answer, np: int, caller: str) -> Exception:
    where = f"on rank {answer.rank} of {np}"
    try:
        error = pickle.loads(answer.content)
    except Exception:  # its class cannot be pickled, or is not here
        error = None
    if not isinstance(error, Exception):  # a rank's SystemExit must not end this process
        return HvdtrainError(f"{caller}: {where}:\n{answer.failure}")
    error.add_note(f"{where}:\n{answer.failure}")
    return error
