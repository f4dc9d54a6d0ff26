"""The settings of a parameter server, from text such as "ps:servers=2,mode=sync"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hvdtrain.errors import UsageError

ALLREDUCE, PARAMETER_SERVER = "allreduce", "ps"
ASYNC, SYNC = "async", "sync"


@dataclass(frozen=True)
class ParameterServer:
    """The options of the parameter server."""

    servers: int = 1
    mode: str = ASYNC
    staleness: int = 4
    backup: int = 0

    @property
    def is_async(self) -> bool:
        """Whether each gradient is an update of its own."""
        return self.mode == ASYNC


def parse_strategy(label: str, text: str) -> ParameterServer | None:
    """Return the parameter server that a text such as "ps:servers=2,mode=sync" describes."""
    if text == ALLREDUCE:
        return None
    name, _, given = text.partition(":")
    if name != PARAMETER_SERVER:
        raise UsageError(f"{label} must be {ALLREDUCE} or {PARAMETER_SERVER}, got {text!r}")
    values = _parse_values(f"{label} {text}", given)
    made = ParameterServer(**values)
    _check(f"{label} {text}", made, values)
    return made


def _parse_values(label: str, given: str) -> dict[str, Any]:
    known = {one.name: one.default for one in fields(ParameterServer)}
    values: dict[str, Any] = {}
    for pair in filter(None, given.split(",")):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or key not in known:
            names = ", ".join(known)
            raise UsageError(f"{label}: expected key=value with one of {names}, got {pair!r}")
        if key in values:
            raise UsageError(f"{label}: {key} is given twice")
        values[key] = value if isinstance(known[key], str) else _whole(f"{label}: {key}", value)
    return values


def _whole(label: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"{label} must be a whole number, got {value!r}") from None


def _check(label: str, made: ParameterServer, given: Mapping[str, Any]) -> None:
    for name, least in (("servers", 1), ("staleness", 0), ("backup", 0)):
        if getattr(made, name) < least:
            raise UsageError(f"{label}: {name} must be at least {least}, got {given[name]}")
    if made.mode not in (ASYNC, SYNC):
        raise UsageError(f"{label}: mode must be {ASYNC} or {SYNC}, got {made.mode!r}")
    other = "backup" if made.is_async else "staleness"
    if other in given:
        raise UsageError(f"{label}: {other} is no option of mode={made.mode}: leave it out")
    if made.backup and made.servers > 1:
        raise UsageError(
            f"{label}: backup needs servers=1: several servers could count different gradients"
        )
