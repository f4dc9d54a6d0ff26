"""Which options go with which framework."""

from __future__ import annotations

from typing import Any

from hvdtrain.errors import UsageError

__all__ = ["require_framework_has"]

_ANY = object()
# What only torch has: an option, the value of it (any but the default), and the reason, if known.
_TORCH_ONLY: tuple[tuple[str, Any, str], ...] = (
    ("optimizer", "lars", ""),
    ("amp", "fp16", ""),
    ("accumulate", _ANY, ""),
    ("ema", _ANY, ""),
    ("compile", _ANY, "Keras compiles the step by itself"),
    ("workers", _ANY, ""),
    ("non_finite", "skip", ""),
    ("virtual_shards", _ANY, ""),
    ("engine", "nccl", "gradients of {framework} are reduced in host memory"),
)


def require_framework_has(framework: str, values: dict[str, tuple[Any, Any]]) -> None:
    """Raise UsageError where an option is asked for that the framework has not.

    Args:
        framework: one of FRAMEWORKS.
        values: of each option by name, the value and the default.
    """
    if framework == "torch":
        return
    for name, refused, reason in _TORCH_ONLY:
        value, default = values[name]
        if value == refused or (refused is _ANY and value != default):
            because = f": {reason.format(framework=framework)}" if reason else ""
            raise UsageError(
                f"--{name.replace('_', '-')} {value} goes with --framework torch only, got "
                f"--framework {framework}{because}"
            )
