"""Settings from the HVDTRAIN_* environment variables and their Horovod equivalents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from hvdtrain.advice import nearest_name
from hvdtrain.errors import UsageError

# Used if no measurement is made.
DEFAULT_BUCKET_BYTES = 25 << 20

_PREFIX = "HVDTRAIN_"
# How alike two names are that only a typing error separates.
_NEAR = 0.9
_LARGEST_MPI_COUNT = (1 << 31) - 1
_STALL_SECONDS = "HVDTRAIN_STALL_SECONDS"
_STALL_SHUTDOWN_SECONDS = "HVDTRAIN_STALL_SHUTDOWN_SECONDS"


@dataclass(frozen=True)
class Config:
    """Settings from environment variables, which must be equal on all ranks."""

    engine: str = "auto"
    bucket_bytes: int | None = None
    first_bucket_bytes: int = 1 << 20
    chunk_bytes: int = 1 << 30
    shared_memory: str = "1"
    torch_allocator: bool = True
    tensorflow_allocator: bool = True
    halves_in_float32: bool = False
    deterministic: bool = False
    timeline: str = "DYNAMIC"
    timeline_mark_cycles: bool = False
    stall_seconds: float = 60
    stall_shutdown_seconds: float = 0
    stall_stacks: bool = False
    abort_on_thread_exception: bool = False
    min_ranks: int = 1
    max_ranks: int = 0
    host_discovery: str = ""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Config:
        """Parse the variables."""
        _refuse_misspelt(environ)
        bucket_bytes = _fusion_threshold(environ)
        if "HVDTRAIN_BUCKET_BYTES" in environ:
            bucket_bytes = _positive(environ, "HVDTRAIN_BUCKET_BYTES", 0)
        first_bucket_bytes = min(cls.first_bucket_bytes, bucket_bytes or cls.first_bucket_bytes)
        return cls(
            engine=environ.get("HVDTRAIN_ENGINE", cls.engine),
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=_positive(
                environ, "HVDTRAIN_FIRST_BUCKET_BYTES", first_bucket_bytes
            ),
            chunk_bytes=_positive(
                environ, "HVDTRAIN_CHUNK_BYTES", cls.chunk_bytes, most=_LARGEST_MPI_COUNT
            ),
            shared_memory=_choice(
                environ, "HVDTRAIN_SHARED_MEMORY", cls.shared_memory, ("0", "1", "numpy")
            ),
            torch_allocator=_switch(environ, "HVDTRAIN_TORCH_ALLOCATOR", cls.torch_allocator),
            tensorflow_allocator=_switch(
                environ, "HVDTRAIN_TENSORFLOW_ALLOCATOR", cls.tensorflow_allocator
            ),
            halves_in_float32=_switch(environ, "HVDTRAIN_HALVES_IN_FLOAT32", cls.halves_in_float32),
            deterministic=_switch(environ, "HVDTRAIN_DETERMINISTIC", cls.deterministic),
            timeline=_either(environ, "TIMELINE", cls.timeline),
            timeline_mark_cycles=_either(environ, "TIMELINE_MARK_CYCLES", "0") != "0",
            stall_seconds=_stall_seconds(environ, cls.stall_seconds),
            stall_shutdown_seconds=_stall_shutdown_seconds(environ, cls.stall_shutdown_seconds),
            stall_stacks=_switch(environ, "HVDTRAIN_STALL_STACKS", cls.stall_stacks),
            abort_on_thread_exception=_switch(
                environ, "HVDTRAIN_ABORT_ON_THREAD_EXCEPTION", cls.abort_on_thread_exception
            ),
            min_ranks=_positive(environ, "HVDTRAIN_MIN_RANKS", cls.min_ranks, what="integer"),
            max_ranks=_positive(environ, "HVDTRAIN_MAX_RANKS", cls.max_ranks, what="integer"),
            host_discovery=environ.get("HVDTRAIN_HOST_DISCOVERY", cls.host_discovery),
        )


def _refuse_misspelt(environ: Mapping[str, str]) -> None:
    """Raise UsageError for a name that is nearly one of hvdtrain's; others may be anybody's."""
    known = [field.name.upper() for field in fields(Config)]
    for name in environ:
        own = name.upper().removeprefix(_PREFIX)
        if own == name.upper() or name in [f"{_PREFIX}{each}" for each in known]:
            continue
        if near := nearest_name(own, known, _NEAR):
            raise UsageError(f"{name} has no effect: did you mean {_PREFIX}{near}?")


def _either(environ: Mapping[str, str], name: str, default: str) -> str:
    return environ.get(f"HVDTRAIN_{name}") or environ.get(f"HOROVOD_{name}") or default


def _positive(
    environ: Mapping[str, str],
    name: str,
    default: int,
    most: int | None = None,
    what: str = "integer, in bytes",
) -> int:
    text = environ.get(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{name}={text!r} must be a positive {what}")
    if most is not None and int(text) > most:
        raise UsageError(f"{name}={text!r} must be at most {most} bytes")
    return int(text)


def _switch(environ: Mapping[str, str], name: str, default: bool) -> bool:
    return _choice(environ, name, str(int(default)), ("0", "1")) == "1"


def _choice(environ: Mapping[str, str], name: str, default: str, choices: tuple[str, ...]) -> str:
    text = environ.get(name, default)
    if text not in choices:
        raise UsageError(f"{name}={text!r} must be {', '.join(choices[:-1])} or {choices[-1]}")
    return text


def _fusion_threshold(environ: Mapping[str, str]) -> int | None:
    """Read Horovod's variable; invalid values are ignored, since job files contain all sorts."""
    text = environ.get("HOROVOD_FUSION_THRESHOLD", "")
    # Horovod's 0 disables fusion: each gradient has its own bucket.
    return max(1, int(text)) if text.isdecimal() else None


def _stall_seconds(environ: Mapping[str, str], default: float) -> float:
    if _STALL_SECONDS in environ:
        return _seconds(environ, _STALL_SECONDS)
    if _horovods(environ, "HOROVOD_STALL_CHECK_DISABLE"):
        return 0
    return _horovods(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS") or default


def _stall_shutdown_seconds(environ: Mapping[str, str], default: float) -> float:
    if _STALL_SHUTDOWN_SECONDS in environ:
        return _seconds(environ, _STALL_SHUTDOWN_SECONDS)
    return _horovods(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") or default


def _seconds(environ: Mapping[str, str], name: str) -> float:
    seconds = _number(environ[name])
    if seconds is None:
        raise UsageError(f"{name}={environ[name]!r} must be a number of seconds, 0 or more")
    return seconds


def _horovods(environ: Mapping[str, str], name: str) -> float:
    """Read a number from a variable of Horovod's; invalid values count as 0."""
    return _number(environ.get(name, "")) or 0


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None
