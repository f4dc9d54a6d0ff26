"""What algorithms on numpy arrays and torch tensors need and the two have not alike.

What both have alike (slices, arithmetic, comparisons, reshape) is used as it is. A bfloat16 has no
numpy type: an algorithm that does not say that it takes half types gets float32 (see Exchange).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer, Elements

__all__ = [
    "Array",
    "HostArray",
    "all_finite",
    "buffer_of",
    "copy",
    "elements_of",
    "is_tensor",
    "like",
    "namespace",
    "of_type",
    "pack_signs",
    "strided",
    "to_float64",
    "to_host",
    "unpack_signs",
    "zeros_like",
]

HostArray = npt.NDArray[Any]


class Array(Protocol):
    """A numpy array or a torch tensor: what both do alike."""

    @property
    def shape(self) -> tuple[int, ...]: ...
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
    """Return the module whose functions take this array: numpy, or torch."""
    return sys.modules["torch"] if is_tensor(array) else np


def all_finite(array: Array) -> Array:
    """Return, without dimensions and on its device, whether no element is infinite or no number."""
    return cast("Array", namespace(array).isfinite(array).all())


def zeros_like(array: Array) -> Array:
    """Return zeros of the same shape, type and device."""
    return cast("Array", namespace(array).zeros_like(array))


def copy(array: Array) -> Array:
    """Return the elements in new memory."""
    made: Any = array
    return cast("Array", made.clone() if is_tensor(array) else made.copy())


def to_float64(array: Array) -> Array:
    """Return the elements in float64; the array itself where they are."""
    given: Any = array
    return cast(
        "Array", given.double() if is_tensor(array) else given.astype("float64", copy=False)
    )


def of_type(array: Array, model: Array) -> Array:
    """Return the elements in the type of another array; the array itself where they are."""
    given, dtype = cast("Any", array), cast("Any", model).dtype
    made = given.to(dtype) if is_tensor(array) else given.astype(dtype, copy=False)
    return cast("Array", made)


def strided(
    elements: Array, start: int, count: int, shape: Sequence[int], strides: Sequence[int]
) -> Array:
    """View `count` elements from `start` on in a shape.

    Args:
        elements: 1-d.
        start: the first one.
        count: how many; the view reaches no others.
        shape: of the view.
        strides: of the view, in elements.
    """
    part: Any = elements[start : start + count]
    if is_tensor(part):
        return cast("Array", part.as_strided(tuple(shape), tuple(strides)))
    nbytes = [stride * part.itemsize for stride in strides]
    return cast("Array", np.lib.stride_tricks.as_strided(part, shape, nbytes))


def to_host(array: Array) -> HostArray:
    """Return the elements as a numpy array of its own; a program waits for a device here."""
    made: Any = array
    return np.array(made.detach().cpu().numpy() if is_tensor(array) else made)


def like(values: HostArray, array: Array) -> Array:
    """Return values from host memory as another array has them: of its type, on its device."""
    if not is_tensor(array):
        return cast("Array", values.astype(cast("HostArray", array).dtype))
    reference: Any = array
    return cast(
        "Array", namespace(array).as_tensor(values, dtype=reference.dtype, device=reference.device)
    )


def elements_of(buffer: Buffer) -> Array:
    """View the elements of a buffer, 1-d."""
    return cast("Array", buffer.elements())


def buffer_of(array: Array) -> Buffer:
    """View a contiguous array."""
    return Buffer.of(cast("Elements", array))


def pack_signs(array: Array) -> Array:
    """Return one bit for each element, set where it is not negative, eight in a byte.

    Args:
        array: 1-d.
    """
    bits: Any = array >= 0
    if not is_tensor(array):
        return cast("Array", np.packbits(bits))
    torch = namespace(array)
    whole = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).reshape(-1, 8)
    return cast("Array", (whole * _places(array)).sum(1, dtype=torch.uint8))


def unpack_signs(packed: Array, model: Array) -> Array:
    """Return 1 and -1 for what pack_signs() has packed, of as many elements and type as `model`."""
    count, reference = model.shape[0], cast("Any", model)
    if is_tensor(packed):
        bits = ((packed.reshape(-1, 1) & _places(packed)) != 0).reshape(-1)[:count]
        signs = bits.to(reference.dtype)
    else:
        signs = np.unpackbits(cast("HostArray", packed), count=count).astype(reference.dtype)
    return cast("Array", signs * 2 - 1)


def _places(array: Array) -> Any:
    """Return what each bit of a byte is worth, the first one most, on a tensor's device."""
    torch, reference = namespace(array), cast("Any", array)
    return torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=reference.device)
