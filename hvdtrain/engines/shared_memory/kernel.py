"""The compiled reduction kernel, and the structures of node_kernel.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_int32, c_int64, c_uint32, c_uint64
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Protocol, cast

from hvdtrain.compiled import KernelError, find_library, open_library, report_missing
from hvdtrain.types import DType, ReduceOp

_SOURCE = Path(__file__).with_name("node_kernel.c")
# In the order in which their texts follow in the library.
_PARTS = (
    *("arithmetic", "combine", "ranks", "task", "parts", "private_data", "shared_data"),
    *("reduce", "vote", "placed", "calls"),
)
_MODULE = "hvdtrain.engines.shared_memory._node_kernel"

TYPES = (
    DType.UINT8,
    DType.UINT16,
    DType.UINT32,
    DType.UINT64,
    DType.INT8,
    DType.INT16,
    DType.INT32,
    DType.INT64,
    DType.FLOAT16,
    DType.BFLOAT16,
    DType.FLOAT32,
    DType.FLOAT64,
    DType.COMPLEX64,
    DType.COMPLEX128,
)
OPS = (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)


class Team(Structure):
    """team_t of node/ranks.h: the state of a node group."""

    _fields_ = (
        ("slots", POINTER(c_uint64)),
        ("rank", c_int32),
        ("size", c_int32),
        ("phase", c_uint32),
        ("turn", c_uint32),
        ("spin_nanoseconds", c_int64),
        ("staging", POINTER(c_uint64)),
        ("chunk_bytes", c_int64),
        ("due", POINTER(c_int64)),
    )


class Task(Structure):
    """task_t of node/task.h: one reduction."""

    _fields_ = (
        ("team", POINTER(Team)),
        ("source", c_uint64),
        ("data", c_uint64),
        ("count", c_int64),
        ("pieces", c_uint64),  # source, data and count of each
        ("copies", POINTER(c_uint64)),
        ("location", c_uint64),
        ("type", c_int32),
        ("op", c_int32),
        ("prescale", c_double),
        ("postscale", c_double),
        ("owners", c_int32),
        ("stage", c_int32),
        ("chunk", c_int64),
        ("ballot", c_uint64 * 6),
    )


class KernelCalls(Protocol):
    """The kernel as a Python module, whose functions cost less than calls through ctypes."""

    def cast(self, task: int, ballot: bytes, number: int, source: int, /) -> None:
        """Vote on an operation, which has a number if it has no name."""

    def look(self, task: int, data: int, /) -> int:
        """Return the verdict, or 0 if peers are not there in a moment, or should be checked."""

    def resume(self, task: int, timeout_nanoseconds: int, /) -> int:
        """Continue a vote that has returned 0; return 0 again after a timeout or a signal."""


def load_kernel() -> ctypes.CDLL | None:
    """Return the library, or None if there is no usable one (see `why_no_kernel`)."""
    return _found()[0]


@cache
def load_calls() -> KernelCalls | None:
    """Return the library as a module; None if there is none, or it lacks Python's headers."""
    kernel = load_kernel()
    spec = None if kernel is None else spec_from_file_location(_MODULE, kernel._name)
    if spec is None:
        return None
    try:
        return cast("KernelCalls", module_from_spec(spec))
    except ImportError:  # it was compiled where Python's headers are not installed
        return None


def agree_on_kernel(rank: int, found: Sequence[bool]) -> ctypes.CDLL | None:
    """Return the library if all ranks have it, else None; the first rank without it logs why."""
    lacking = [number for number, has in enumerate(found) if not has]
    if lacking[:1] == [rank]:
        path = find_library(_MODULE, _SOURCE.parent)
        report_missing(path, "ranks of a node add with numpy", why_no_kernel())
    return None if lacking else load_kernel()


def why_no_kernel() -> str:
    """Return why there is no usable kernel and what to do, or "" if there is one."""
    return _found()[1]


@cache
def _found() -> tuple[ctypes.CDLL | None, str]:
    try:
        return open_kernel(find_library(_MODULE, _SOURCE.parent)), ""
    except KernelError as error:
        return None, str(error)


def open_kernel(path: Path | None) -> ctypes.CDLL:
    parts = _SOURCE.with_name("node")
    headers = [parts / f"{name}.h" for name in _PARTS]
    library = open_library(path, _SOURCE, *headers)
    library.hvd_slot_bytes.restype = c_int64
    library.hvd_staging_bytes.restype = c_int64
    library.hvd_staging_bytes.argtypes = [c_int64]
    library.hvd_start_max.restype = None
    library.hvd_start_max.argtypes = [POINTER(Team), POINTER(c_uint64), c_int32]
    library.hvd_finish_max.argtypes = [POINTER(Team), POINTER(c_uint64), c_int32, c_int64]
    for call in (library.hvd_reduce, library.hvd_vote, library.hvd_add, library.hvd_spread):
        call.argtypes = [POINTER(Task), c_int64]
    library.hvd_gather.argtypes = [POINTER(Task), POINTER(c_int64), c_int64]
    library.hvd_copy.restype = None
    library.hvd_copy.argtypes = [c_uint64, c_uint64, c_int64]
    library.hvd_add_placed.restype = None
    library.hvd_add_placed.argtypes = [
        *(POINTER(c_uint64), c_int64, c_int32, c_int32, c_int32, POINTER(c_double), c_double)
    ]
    library.hvd_slice_start.argtypes = [POINTER(Task), c_int32]
    library.hvd_slice_start.restype = c_int64
    return library
