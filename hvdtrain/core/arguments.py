"""The arguments of operations, checked and interpreted."""

from __future__ import annotations

import warnings

from hvdtrain.types import ReduceOp

# bool is reduced as 0 and 1: any rank, or every rank.
_BOOL_OPS = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.AVERAGE: ReduceOp.MIN,
    ReduceOp.MIN: ReduceOp.MIN,
    ReduceOp.PRODUCT: ReduceOp.MIN,
}


def choose_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Return the reduction from the argument `op` or its deprecated predecessor `average`."""
    if op is not None and average is not None:
        raise ValueError("op and average mean the same: pass only op")
    if average is not None:
        warnings.warn("average is deprecated: use op=Average or op=Sum", DeprecationWarning, 3)
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    if op is not None and not isinstance(op, ReduceOp):
        raise ValueError(f"op must be Average, Sum, Min, Max, Product or Adasum, got {op!r}")
    return op or ReduceOp.AVERAGE


def check_has_gradient(operation: str, op: ReduceOp) -> None:
    """Refuse the gradient of a reduction that is not linear."""
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"{operation} with op={op.value} has no gradient: use Average or Sum")


def op_on_wire(
    kinds: list[str], op: ReduceOp, prescale_factor: float, postscale_factor: float
) -> tuple[ReduceOp, list[str]]:
    """Return the reduction for the engine, and the types on which ranks must agree.

    bool is reduced as 0 and 1, for which the engine uses the same reduction for several `op`.
    """
    if not kinds:
        raise ValueError("a group needs at least one tensor")
    if "bool" not in kinds:
        return op, kinds
    if any(kind != "bool" for kind in kinds):
        raise ValueError("a group cannot contain both bool and other tensors")
    if (prescale_factor, postscale_factor) != (1.0, 1.0):
        raise ValueError("a factor cannot be applied to bool")
    if op not in _BOOL_OPS:
        raise ValueError(f"{op.value} is not defined for bool")
    return _BOOL_OPS[op], [f"bool ({op.value})"] * len(kinds)
