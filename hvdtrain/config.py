"""Every HVDTRAIN_* variable, parsed once, and those of Horovod that mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.errors import UsageError

__all__ = ["DEFAULT_BUCKET_BYTES", "Config"]

# Where nothing is measured.
DEFAULT_BUCKET_BYTES = 25 << 20

_LARGEST_MPI_COUNT = (1 << 31) - 1
_STALL_SECONDS = "HVDTRAIN_STALL_SECONDS"
_STALL_SHUTDOWN_SECONDS = "HVDTRAIN_STALL_SHUTDOWN_SECONDS"


@dataclass(frozen=True)
class Config:
    """Settings that come from the environment; every rank must be given the same ones.

    Attributes:
        engine: HVDTRAIN_ENGINE, the engine that `init()` takes when it is told none.
        bucket_bytes: HVDTRAIN_BUCKET_BYTES, the most gradient bytes reduced together; without
            it Horovod's HOROVOD_FUSION_THRESHOLD; None leaves it to a measurement.
        first_bucket_bytes: HVDTRAIN_FIRST_BUCKET_BYTES, smaller so that reducing starts early.
        chunk_bytes: HVDTRAIN_CHUNK_BYTES, the most bytes handed to one MPI call that moves
            data; below 2^31, the largest count that every MPI takes.
        shared_memory: HVDTRAIN_SHARED_MEMORY, whether ranks of a node reduce in shared memory: "0"
            is no, "1" is yes, and "numpy" is with numpy even where the compiled kernel is.
        halves_in_float32: HVDTRAIN_HALVES_IN_FLOAT32, whether engine nccl adds half types in
            float32, which is slower and rounded once; one rank's word is enough.
        deterministic: HVDTRAIN_DETERMINISTIC, whether sums are added in one fixed order.
        timeline: HVDTRAIN_TIMELINE or HOROVOD_TIMELINE, the file for a timeline of the whole
            job; "DYNAMIC" is Horovod's word for none before start_timeline().
        timeline_mark_cycles: HVDTRAIN_TIMELINE_MARK_CYCLES or HOROVOD_TIMELINE_MARK_CYCLES,
            whether it marks rounds of agreement: 0 is no, all else is yes.
        stall_seconds: HVDTRAIN_STALL_SECONDS, how long an operation may wait for ranks before
            they are named; 0 for ever. Without it HOROVOD_STALL_CHECK_TIME_SECONDS, and 0 where
            HOROVOD_STALL_CHECK_DISABLE says so.
        stall_shutdown_seconds: HVDTRAIN_STALL_SHUTDOWN_SECONDS, when the job ends for it; 0 for
            never. Without it HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.
        stall_stacks: HVDTRAIN_STALL_STACKS, whether the Python stacks of all ranks follow.
        abort_on_thread_exception: HVDTRAIN_ABORT_ON_THREAD_EXCEPTION, whether an uncaught exception
            in any Python thread ends the job, instead of one in the main thread or hvdtrain's only.
    """

    engine: str = "auto"
    bucket_bytes: int | None = None
    first_bucket_bytes: int = 1 << 20
    chunk_bytes: int = 1 << 30
    shared_memory: str = "1"
    halves_in_float32: bool = False
    deterministic: bool = False
    timeline: str = "DYNAMIC"
    timeline_mark_cycles: bool = False
    stall_seconds: float = 60
    stall_shutdown_seconds: float = 0
    stall_stacks: bool = False
    abort_on_thread_exception: bool = False

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Config:
        """Parse the variables; UsageError names one that makes no sense."""
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
        )


def _either(environ: Mapping[str, str], name: str, default: str) -> str:
    return environ.get(f"HVDTRAIN_{name}") or environ.get(f"HOROVOD_{name}") or default


def _positive(environ: Mapping[str, str], name: str, default: int, most: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{name}={text!r} must be a positive whole number of bytes")
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
    """Read Horovod's variable; job files hold all sorts, so nonsense counts as not set."""
    text = environ.get("HOROVOD_FUSION_THRESHOLD", "")
    # Horovod's 0 is no fusion: each gradient has a bucket of its own.
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
    """Read a number from a variable of Horovod's; an odd one must not break a run, and is 0."""
    return _number(environ.get(name, "")) or 0


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None
