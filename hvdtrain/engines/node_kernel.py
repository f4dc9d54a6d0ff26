"""The compiled part of the engine: see node_kernel.c, whose structures these are."""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, Structure, c_double, c_int32, c_int64, c_uint32, c_uint64
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from hvdtrain.types import DType, ReduceOp

__all__ = ["OPS", "TYPES", "Task", "Team", "load_kernel"]

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
    """team_t."""

    _fields_ = (
        ("slots", POINTER(c_uint64)),
        ("rank", c_int32),
        ("size", c_int32),
        ("phase", c_uint32),
        ("turn", c_uint32),
        ("spin_nanoseconds", c_int64),
        ("staging", POINTER(c_uint64)),
        ("chunk_bytes", c_int64),
    )


class Task(Structure):
    """task_t."""

    _fields_ = (
        ("team", POINTER(Team)),
        ("source", c_uint64),
        ("data", c_uint64),
        ("copies", POINTER(c_uint64)),
        ("location", c_uint64),
        ("count", c_int64),
        ("type", c_int32),
        ("op", c_int32),
        ("prescale", c_double),
        ("postscale", c_double),
        ("owners", c_int32),
        ("stage", c_int32),
        ("chunk", c_int64),
    )


def _find_library() -> Path | None:
    """Look beside this file, and where packages are installed: a checkout has only the source."""
    for folder in (Path(__file__).parents[2], *map(Path, sys.path)):
        for suffix in EXTENSION_SUFFIXES:
            path = folder / "hvdtrain" / "engines" / f"_node_kernel{suffix}"
            if path.is_file():
                return path
    return None


@cache
def load_kernel() -> ctypes.CDLL | None:
    """Return the library; None where it could not be compiled when hvdtrain was installed.

    One that was compiled from another version of the source does not count.
    """
    path = _find_library()
    if path is None:
        return None
    try:
        library = ctypes.CDLL(str(path))
        library.hvd_layout.restype = c_int64
    except (AttributeError, OSError):
        return None
    if library.hvd_layout() != ctypes.sizeof(Team) << 32 | ctypes.sizeof(Task):
        return None
    library.hvd_slot_bytes.restype = c_int64
    library.hvd_staging_bytes.restype = c_int64
    library.hvd_staging_bytes.argtypes = [c_int64]
    library.hvd_start_max.restype = None
    library.hvd_start_max.argtypes = [POINTER(Team), POINTER(c_uint64), c_int32]
    library.hvd_finish_max.argtypes = [POINTER(Team), POINTER(c_uint64), c_int32, c_int64]
    for call in (library.hvd_reduce, library.hvd_add, library.hvd_spread):
        call.argtypes = [POINTER(Task), c_int64]
    library.hvd_slice_start.argtypes = [POINTER(Task), c_int32]
    library.hvd_slice_start.restype = c_int64
    return library
