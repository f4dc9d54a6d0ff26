"""What the backend of torch.distributed does not do, and the errors that say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import hvdtrain.torch as hvd
from hvdtrain.errors import UnsupportedError
from hvdtrain.types import ReduceOp

_REDUCTIONS = {
    "SUM": hvd.Sum,
    "AVG": hvd.Average,
    "MIN": hvd.Min,
    "MAX": hvd.Max,
    "PRODUCT": hvd.Product,
}


def missing(operation: str, instead: str) -> Callable[..., NoReturn]:
    """Return a method that refuses an operation."""

    def refuse(self: Any, *arguments: Any) -> NoReturn:
        raise UnsupportedError(
            f"{hvd.rank()}/{hvd.size()}: backend hvdtrain has no {operation}: {instead}"
        )

    return refuse


def reduction_of(options: Any) -> ReduceOp:
    """Return the reduction that options of torch.distributed name; without options the sum."""
    name = "SUM" if options is None else options.reduceOp.op.name
    if name not in _REDUCTIONS:
        raise UnsupportedError(f"backend hvdtrain reduces by {', '.join(_REDUCTIONS)}, not {name}")
    return _REDUCTIONS[name]


def require_all_ranks(rank: int, size: int) -> None:
    """Check that a group has all ranks in their order."""
    if (rank, size) != (hvd.rank(), hvd.size()):
        raise UnsupportedError(
            f"{hvd.rank()}/{hvd.size()}: backend hvdtrain has groups of all ranks in their order "
            f"only, and this is {rank} of {size}: start ranks by `python -m hvdtrain exec`, and "
            "give a group of fewer ranks another backend"
        )
