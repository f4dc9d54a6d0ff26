"""Settings from the HVDTRAIN_* environment variables and their Horovod equivalents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hvdtrain.errors import UsageError, nearest_name

# Used if no measurement is made.
DEFAULT_BUCKET_BYTES = 25 << 20

_PREFIX = "HVDTRAIN_"
# How alike two names are that only a typing error separates.
_NEAR = 0.9
_LARGEST_MPI_COUNT = (1 << 31) - 1
_READ = "read"


def _positive(what: str = "integer, in bytes", most: int | None = None) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"a positive {what}")
        if most is not None and int(text) > most:
            raise ValueError(f"at most {most} bytes")
        return int(text)

    return read


def _choice(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{', '.join(choices[:-1])} or {choices[-1]}")
        return text

    return read


def _switch(text: str) -> bool:
    return _choice("0", "1")(text) == "1"


def _seconds(text: str) -> float:
    seconds = _number(text)
    if seconds is None:
        raise ValueError("a number of seconds, 0 or more")
    return seconds


def _variable(default: Any, read: Callable[[str], Any]) -> Any:
    """Return a field whose variable has its name; `read` says in a ValueError what it must be."""
    return field(default=default, metadata={_READ: read})


@dataclass(frozen=True)
class Config:
    """Settings from environment variables, which must be equal on all ranks."""

    engine: str = _variable("auto", str)
    bucket_bytes: int | None = _variable(None, _positive())
    first_bucket_bytes: int = _variable(1 << 20, _positive())
    chunk_bytes: int = _variable(1 << 30, _positive(most=_LARGEST_MPI_COUNT))
    shared_memory: str = _variable("1", _choice("0", "1", "numpy"))
    torch_allocator: bool = _variable(True, _switch)
    torch_steps: bool = _variable(True, _switch)
    keras_steps: bool = _variable(True, _switch)
    tensorflow_allocator: bool = _variable(True, _switch)
    halves_in_float32: bool = _variable(False, _switch)
    deterministic: bool = _variable(False, _switch)
    timeline: str = "DYNAMIC"
    timeline_mark_cycles: bool = False
    stall_seconds: float = _variable(60, _seconds)
    stall_shutdown_seconds: float = _variable(0, _seconds)
    stall_stacks: bool = _variable(False, _switch)
    flight_record: str = _variable("", str)
    abort_on_thread_exception: bool = _variable(False, _switch)
    min_ranks: int = _variable(1, _positive("integer"))
    max_ranks: int = _variable(0, _positive("integer"))
    host_discovery: str = _variable("", str)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Config:
        """Parse the variables."""
        _refuse_misspelt(environ)
        values = _of_horovod(environ)
        for one in fields(cls):
            name = f"{_PREFIX}{one.name.upper()}"
            if _READ in one.metadata and name in environ:
                try:
                    values[one.name] = one.metadata[_READ](environ[name])
                except ValueError as error:
                    raise UsageError(f"{name}={environ[name]!r} must be {error}") from None
        if "bucket_bytes" in values and "first_bucket_bytes" not in values:
            values["first_bucket_bytes"] = min(cls.first_bucket_bytes, values["bucket_bytes"])
        return cls(**values)


def _refuse_misspelt(environ: Mapping[str, str]) -> None:
    """Raise UsageError for a name that is nearly one of hvdtrain's; others may be anybody's."""
    known = [field.name.upper() for field in fields(Config)]
    for name in environ:
        own = name.upper().removeprefix(_PREFIX)
        if own == name.upper() or name in [f"{_PREFIX}{each}" for each in known]:
            continue
        if near := nearest_name(own, known, _NEAR):
            raise UsageError(f"{name} has no effect: did you mean {_PREFIX}{near}?")


def _of_horovod(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read Horovod's variables; invalid values are ignored, since job files contain all sorts."""

    def either(name: str, default: str) -> str:
        return environ.get(f"{_PREFIX}{name}") or environ.get(f"HOROVOD_{name}") or default

    def seconds(name: str) -> float:
        return _number(environ.get(f"HOROVOD_{name}", "")) or 0.0

    values: dict[str, Any] = {
        "timeline": either("TIMELINE", Config.timeline),
        "timeline_mark_cycles": either("TIMELINE_MARK_CYCLES", "0") != "0",
        "stall_seconds": seconds("STALL_CHECK_TIME_SECONDS") or Config.stall_seconds,
        "stall_shutdown_seconds": seconds("STALL_SHUTDOWN_TIME_SECONDS") or 0,
    }
    if seconds("STALL_CHECK_DISABLE"):
        values["stall_seconds"] = 0
    threshold = environ.get("HOROVOD_FUSION_THRESHOLD", "")
    if threshold.isdecimal():
        # Horovod's 0 disables fusion: each gradient has its own bucket.
        values["bucket_bytes"] = max(1, int(threshold))
    return values


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None
