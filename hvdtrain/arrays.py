"""Functions on numpy arrays and torch tensors, for what the two do differently.

What is the same in both (slices, arithmetic, comparisons, reshape) is used directly. numpy has no
bfloat16: algorithms get float32 unless they declare support for half types (see Exchange).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol, cast

import numpy as np

from hvdtrain.buffer import Buffer, Elements

__all__ = [
    "Array",
    "HostArray",
    "all_finite",
    "as_bytes",
    "buffer_of",
    "concatenate",
    "contiguous",
    "copy",
    "elements_of",
    "from_bytes",
    "is_tensor",
    "like",
    "like_shape",
    "namespace",
    "of_type",
    "pack_signs",
    "strided",
    "to_float64",
    "to_host",
    "unpack_signs",
    "zeros_like",
]

# Parts of a host array that, with what is computed of them, fit into the cache of a core.
_PART_ELEMENTS = 1 << 16

HostArray = np.ndarray[Any, np.dtype[Any]]


class Array(Protocol):
    """The common interface of numpy arrays and torch tensors, of any shape and dtype."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def T(self) -> Array: ...  # the name in numpy and torch
    def reshape(self, *shape: int) -> Array: ...
    def __getitem__(self, key: Any, /) -> Array: ...
    def __setitem__(self, key: Any, value: Any, /) -> None: ...
    def __add__(self, other: Any, /) -> Array: ...
    def __sub__(self, other: Any, /) -> Array: ...
    def __mul__(self, other: Any, /) -> Array: ...
    def __truediv__(self, other: Any, /) -> Array: ...
    def __matmul__(self, other: Any, /) -> Array: ...
    def __rsub__(self, other: Any, /) -> Array: ...
    def __ge__(self, other: Any, /) -> Array: ...
    def __lt__(self, other: Any, /) -> Array: ...
    def __abs__(self) -> Array: ...
    def mean(self) -> Array: ...


def is_tensor(array: Array) -> bool:
    """Return whether an array is a torch tensor."""
    return not isinstance(array, (np.ndarray, np.generic))


def namespace(array: Array) -> ModuleType:
    """Return the module with functions for this array: numpy or torch."""
    return sys.modules["torch"] if is_tensor(array) else np


def all_finite(array: Array) -> Array:
    """Return whether all elements of a 1-d array are finite, as a 0-d bool array on its device."""
    if is_tensor(array):
        return cast("Array", namespace(array).isfinite(array).all())
    host, lows = cast("HostArray", array), range(0, array.shape[0], _PART_ELEMENTS)
    finite = all(np.isfinite(host[low : low + _PART_ELEMENTS]).all() for low in lows)
    return cast("Array", np.bool_(finite))


def zeros_like(array: Array) -> Array:
    """Return zeros of the same shape, dtype and device."""
    return cast("Array", namespace(array).zeros_like(array))


def copy(array: Array) -> Array:
    """Return a copy of the array."""
    made: Any = array
    return cast("Array", made.clone() if is_tensor(array) else made.copy())


def contiguous(array: Array) -> Array:
    """Return a contiguous copy of the array, or itself if it is contiguous."""
    made: Any = array
    return cast("Array", made.contiguous() if is_tensor(array) else np.ascontiguousarray(made))


def to_float64(array: Array) -> Array:
    """Return the array converted to float64, or itself if it is float64."""
    given: Any = array
    return cast(
        "Array", given.double() if is_tensor(array) else given.astype("float64", copy=False)
    )


def of_type(array: Array, model: Array) -> Array:
    """Return an array converted to the dtype of another, or itself if they are equal.

    Args:
        array: array of any shape.
        model: array with the wanted dtype.
    """
    given, dtype = cast("Any", array), cast("Any", model).dtype
    made = given.to(dtype) if is_tensor(array) else given.astype(dtype, copy=False)
    return cast("Array", made)


def like_shape(array: Array, shape: Sequence[int], dtype: str | None = None) -> Array:
    """Return uninitialized elements on the device of another array.

    Args:
        array: array with the wanted device.
        shape: shape of the result.
        dtype: name of the dtype; by default that of the array.
    """
    reference, xp = cast("Any", array), namespace(array)
    kind = reference.dtype if dtype is None else getattr(xp, dtype)
    if is_tensor(array):
        return cast("Array", xp.empty(tuple(shape), dtype=kind, device=reference.device))
    return cast("Array", np.empty(tuple(shape), kind))


def concatenate(arrays: Sequence[Array]) -> Array:
    """Return the elements of 1-d arrays, one after the other.

    Args:
        arrays: at least one array, all of the same dtype and device.
    """
    return cast("Array", namespace(arrays[0]).concatenate(list(arrays)))


def as_bytes(array: Array) -> Array:
    """Return a view of the bytes of a contiguous array, 1-d uint8."""
    made: Any = array
    return cast("Array", made.reshape(-1).view(namespace(array).uint8))


def from_bytes(data: Array, array: Array) -> Array:
    """Return a view of bytes as elements of the dtype of another array.

    Args:
        data: 1-d uint8, aligned to the elements.
        array: array with the wanted dtype.
    """
    made, reference = cast("Any", data), cast("Any", array)
    return cast("Array", made.view(reference.dtype))


def strided(
    elements: Array, start: int, count: int, shape: Sequence[int], strides: Sequence[int]
) -> Array:
    """Return a strided view of part of a 1-d array.

    Args:
        elements: 1-d array.
        start: index of the first element.
        count: number of elements; the view accesses no others.
        shape: shape of the view.
        strides: strides of the view, in elements.
    """
    part: Any = elements[start : start + count]
    if is_tensor(part):
        return cast("Array", part.as_strided(tuple(shape), tuple(strides)))
    nbytes = [stride * part.itemsize for stride in strides]
    return cast("Array", np.lib.stride_tricks.as_strided(part, shape, nbytes))


def to_host(array: Array) -> HostArray:
    """Return a copy as a numpy array; this synchronizes with a device."""
    made: Any = array
    return np.array(made.detach().cpu().numpy() if is_tensor(array) else made)


def like(values: HostArray, array: Array) -> Array:
    """Return values with the dtype and on the device of another array.

    Args:
        values: numpy array of any shape.
        array: array with the wanted dtype and device.
    """
    if not is_tensor(array):
        return cast("Array", values.astype(cast("HostArray", array).dtype))
    reference: Any = array
    return cast(
        "Array", namespace(array).as_tensor(values, dtype=reference.dtype, device=reference.device)
    )


def elements_of(buffer: Buffer) -> Array:
    """Return the elements of a buffer as a 1-d view."""
    return cast("Array", buffer.elements())


def buffer_of(array: Array) -> Buffer:
    """Return a buffer over a contiguous array.

    Raises:
        ValueError: the array is not contiguous.
    """
    return Buffer.of(cast("Elements", array))


def pack_signs(array: Array) -> Array:
    """Return one bit per element, set if it is not negative, packed eight to a byte.

    Args:
        array: 1-d, real.

    Returns:
        [ceil(n / 8)] uint8, on the same device.
    """
    bits: Any = array >= 0
    if not is_tensor(array):
        return cast("Array", np.packbits(bits))
    torch = namespace(array)
    whole = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).reshape(-1, 8)
    return cast("Array", (whole * _bit_values(array)).sum(1, dtype=torch.uint8))


def unpack_signs(packed: Array, model: Array) -> Array:
    """Return the signs packed by pack_signs() as 1 and -1.

    Args:
        packed: [ceil(n / 8)] uint8.
        model: array with the wanted number of elements n and dtype.
    """
    count, reference = model.shape[0], cast("Any", model)
    if is_tensor(packed):
        bits = ((packed.reshape(-1, 1) & _bit_values(packed)) != 0).reshape(-1)[:count]
        signs = bits.to(reference.dtype)
    else:
        signs = np.unpackbits(cast("HostArray", packed), count=count).astype(reference.dtype)
    return cast("Array", signs * 2 - 1)


def _bit_values(array: Array) -> Any:
    """Return the values of a byte's bits, the highest first: [8] uint8 on the tensor's device."""
    torch, reference = namespace(array), cast("Any", array)
    return torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=reference.device)
