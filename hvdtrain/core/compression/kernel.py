"""The compiled arithmetic of codes, and the structure of codes_kernel.c."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint64
from functools import cache
from pathlib import Path

from hvdtrain.arrays import Array, buffer_of
from hvdtrain.compiled.library import load_or_report, open_library
from hvdtrain.types import DType

_SOURCE = Path(__file__).with_name("codes_kernel.c")
_CALLS = ("encode", "decode", "add_decoded")
_MODULE = "hvdtrain.core.compression._codes_kernel"


class _Table(Structure):
    """table_t of codes_kernel.c: rows of one length, and their codes."""

    _fields_ = (
        ("rows", c_uint64),
        ("factors", c_uint64),
        ("codes", c_uint64),
        ("count", c_int64),
        ("length", c_int64),
        ("bits", c_int32),
        ("is_double", c_int32),
    )


@cache
def load_kernel() -> ctypes.CDLL | None:
    """Return the library, or None if there is no usable one, of which the log tells the reason."""
    without = "gradients are coded with numpy"
    return load_or_report(_MODULE, _SOURCE.parent, open_kernel, without)


def open_kernel(path: Path | None) -> ctypes.CDLL:
    """Load the library from a file."""
    library = open_library(path, _SOURCE)
    for call in _CALLS:
        function = getattr(library, f"hvd_{call}")
        function.restype, function.argtypes = None, [POINTER(_Table)]
    return library


def with_kernel(call: str, rows: Array, factors: Array, codes: Array, bits: int) -> bool:
    """Do with the kernel what a function of array_codes does; return False where there is none.

    Args:
        rows: [rows, length], contiguous, float32 or float64.
        factors: [rows, 2], contiguous, in the dtype of the rows.
    """
    memory = buffer_of(rows)
    library = load_kernel() if memory.device == "cpu" else None
    if library is None:
        return False
    table = _Table(
        memory.pointer,
        buffer_of(factors).pointer,
        buffer_of(codes).pointer,
        *rows.shape,
        bits,
        memory.dtype is DType.FLOAT64,
    )
    getattr(library, f"hvd_{call}")(table)
    return True
