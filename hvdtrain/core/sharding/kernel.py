"""The compiled optimizer step, and the structures of update_kernel.c."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_int32, c_int64, c_uint64
from functools import cache
from pathlib import Path

from hvdtrain.compiled.library import load_or_report, open_library

_SOURCE = Path(__file__).with_name("update_kernel.c")
_MODULE = "hvdtrain.core.sharding._update_kernel"

KINDS = ("sgd", "adam", "adamw")


class KernelRule(Structure):
    """rule_t of update_kernel.c: the settings of a parameter group."""

    _fields_ = (
        ("lr", c_double),
        ("weight_decay", c_double),
        ("momentum", c_double),
        ("dampening", c_double),
        ("beta1", c_double),
        ("beta2", c_double),
        ("epsilon", c_double),
        ("kind", c_int32),  # as in KINDS
        ("maximize", c_int32),
        ("nesterov", c_int32),
        ("amsgrad", c_int32),
    )


class KernelSegment(Structure):
    """segment_t of update_kernel.c: elements of a parameter that this rank updates."""

    _fields_ = (
        ("gradients", c_uint64),
        ("weights", c_uint64),
        ("state", c_uint64 * 3),
        ("steps", c_uint64),
        ("squares", c_double),
        ("count", c_int64),
        ("rest", c_int64),
        ("rule", c_int32),
        ("is_double", c_int32),
        ("skipped", c_int32),
        ("begins", c_int32),
    )


class KernelUpdate(Structure):
    """update_t of update_kernel.c: an optimizer's step."""

    _fields_ = (
        ("segments", POINTER(KernelSegment)),
        ("segment_count", c_int64),
        ("rules", POINTER(KernelRule)),
        ("prescales", POINTER(c_double)),
        ("postscale", c_double),
        ("factor", c_double),
        ("gradient_count", c_int32),
        ("copies", c_int32),
        ("own", c_int32),
        ("contracts", c_int32),
    )


@cache
def load_kernel() -> ctypes.CDLL | None:
    """Return the library, or None if there is no usable one, of which the log tells the reason."""
    without = "shared optimizer steps take several passes over memory"
    return load_or_report(_MODULE, _SOURCE.parent, open_kernel, without)


def open_kernel(path: Path | None) -> ctypes.CDLL:
    """Load the library from a file."""
    library = open_library(path, _SOURCE)
    for function in (library.hvd_update, library.hvd_sum):
        function.restype, function.argtypes = None, [POINTER(KernelUpdate)]
    return library
