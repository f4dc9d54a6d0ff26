"""The flat piece of memory that every engine moves, on the host or on a device."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from hvdtrain.types import DType

__all__ = ["Buffer", "Elements", "Tensor"]

_FRACTIONAL = frozenset({DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128})
# By numpy's and torch's own types; looking one up by its name takes longer than all else.
_DTYPES: dict[object, DType] = {}


class Tensor(Protocol):
    """What is used of a torch tensor here; nothing below the adapters imports torch."""

    @property
    def dtype(self) -> object: ...
    @property
    def device(self) -> object: ...
    @property
    def is_cpu(self) -> bool: ...
    @property
    def requires_grad(self) -> bool: ...
    def data_ptr(self) -> int: ...
    def numel(self) -> int: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def stride(self) -> Any: ...
    def is_contiguous(self) -> bool: ...
    def detach(self) -> Self: ...
    def view(self, shape_or_dtype: Any, /) -> Self: ...
    def narrow(self, dim: int, start: int, length: int) -> Self: ...
    def new_empty(self, size: Any, /) -> Self: ...
    def copy_(self, source: Any, /) -> Self: ...
    def zero_(self) -> Self: ...
    def mul_(self, factor: Any, /) -> Self: ...
    def double(self) -> Self: ...
    def trunc_(self) -> Self: ...


# The elements of a buffer, one after the other.
Elements: TypeAlias = npt.NDArray[Any] | Tensor


# Not frozen, which would triple the time to make one.
@dataclass(slots=True)
class Buffer:
    """`count` contiguous elements of `dtype` that start at address `pointer` on `device`.

    `owner` is whatever keeps the memory alive; the buffer holds it as long as it lives. Where it
    is a torch tensor, its elements are exactly the buffer's. `pointer` is 0 on a device whose
    memory has no addresses.
    """

    pointer: int
    dtype: DType
    count: int
    device: str = "cpu"
    owner: object = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, elements: Elements, dtype: DType | None = None) -> Buffer:
        """View a C-contiguous array or a contiguous torch tensor, without copying it.

        Args:
            elements: of any shape.
            dtype: the element type where numpy has none (bfloat16, as uint16); by default the
                array's or the tensor's own.

        Raises:
            ValueError: the memory is not contiguous, or has no such element type.
        """
        if isinstance(elements, np.ndarray):
            return cls.from_array(elements, dtype)
        if not elements.is_contiguous():
            raise ValueError(f"a Buffer needs contiguous memory, got strides {elements.stride()}")
        tensor = elements.detach() if elements.requires_grad else elements
        own = _DTYPES.get(tensor.dtype) or _learn(tensor.dtype)
        device = "cpu" if tensor.is_cpu else str(tensor.device)
        return cls(_address(tensor), own, tensor.numel(), device, tensor)

    @classmethod
    def from_array(cls, array: npt.NDArray[np.generic], dtype: DType | None = None) -> Buffer:
        """View a C-contiguous array; `dtype` names the type where numpy has none (bfloat16)."""
        if not array.flags.c_contiguous:
            raise ValueError(f"a Buffer needs C-contiguous memory, got strides {array.strides}")
        own = dtype or _DTYPES.get(array.dtype) or _learn(array.dtype)
        return cls(array.ctypes.data, own, array.size, owner=array)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * self.dtype.itemsize

    def elements(self) -> Elements:
        """Return the elements as a writable 1-d view: the tensor where there is one, else numpy's.

        numpy shows bfloat16 as uint16.
        """
        owner = self.owner
        return _flat(owner) if _is_tensor(owner) else self.array()

    def array(self) -> npt.NDArray[np.generic]:
        """Return the elements as a writable 1-d numpy view (CPU only; bfloat16 as uint16)."""
        if self.device != "cpu":
            raise ValueError(f"numpy cannot see memory on {self.device}")
        if self.count == 0:
            return np.empty(0, self.dtype.numpy)
        memory = (ctypes.c_byte * self.nbytes).from_address(self.pointer)
        memory.owner = self.owner  # type: ignore[attr-defined]  # lives as long as the array
        return np.frombuffer(memoryview(memory), self.dtype.numpy)

    def host(self) -> Buffer:
        """View the same memory without its tensor, for an engine that computes on the CPU.

        torch would multiply with as many threads as the program's own, beside them.

        Raises:
            ValueError: the memory is on a device.
        """
        if self.device != "cpu":
            raise ValueError(f"memory on {self.device} is not the host's")
        return Buffer(self.pointer, self.dtype, self.count, owner=self)

    def like(self, count: int) -> Buffer:
        """Return `count` uninitialised elements of the same type, kind of memory and device."""
        owner = self.owner
        if _is_tensor(owner):
            return Buffer.of(owner.new_empty((count,)))
        return Buffer.from_array(np.empty(count, self.dtype.numpy), self.dtype)

    def view(self, dtype: DType) -> Buffer:
        """View the same memory as elements of another type.

        Raises:
            ValueError: it does not hold a whole number of them.
        """
        count, rest = divmod(self.nbytes, dtype.itemsize)
        if rest:
            raise ValueError(f"{self.nbytes} bytes are no whole number of {dtype.value}")
        owner: object = self
        if _is_tensor(self.owner):
            owner = _flat(self.owner).view(getattr(sys.modules["torch"], dtype.value))
        return Buffer(self.pointer, dtype, count, self.device, owner)

    def zero(self) -> None:
        """Set every element to zero."""
        if self.device == "cpu":
            ctypes.memset(self.pointer, 0, self.nbytes)
        elif _is_tensor(self.owner):
            with _writing():
                self.owner.zero_()

    def copy_from(self, other: Buffer) -> None:
        """Overwrite the elements with those of another buffer on the same device.

        Raises:
            ValueError: it is on another device, of another type or size.
        """
        if (other.device, other.dtype, other.count) != (self.device, self.dtype, self.count):
            raise ValueError(f"{other} cannot be copied to {self}")
        if self.device == "cpu":
            ctypes.memmove(self.pointer, other.pointer, self.nbytes)
        elif _is_tensor(self.owner):
            with _writing():
                _flat(self.owner).copy_(other.elements())

    def scale(self, factor: float) -> None:
        """Multiply every element by `factor` in place; the factor 1 leaves the memory untouched.

        Integers are multiplied in float64 and truncated; half types, of tensors, in float32.

        Raises:
            ValueError: the elements are bool, or of a half type in numpy's memory.
        """
        if factor == 1.0:
            return
        if _is_tensor(self.owner):
            with _writing():
                _scale_tensor(self.owner, self.dtype, factor)
        else:
            _scale_array(self.array(), self.dtype, factor)

    def slice(self, start: int, count: int) -> Buffer:
        """View `count` elements from element `start` on."""
        if start < 0 or count < 0 or start + count > self.count:
            raise ValueError(f"slice {start}+{count} lies outside a buffer of {self.count}")
        address = self.pointer + start * self.dtype.itemsize if self.pointer else 0
        owner: object = self
        if _is_tensor(self.owner):
            owner = _flat(self.owner).narrow(0, start, count)
        return Buffer(address, self.dtype, count, self.device, owner)

    def pieces(self, nbytes: int) -> Iterator[Buffer]:
        """Cut it into views of at most `nbytes` (but at least one element); none of nothing."""
        if self.nbytes <= nbytes:
            if self.count:
                yield self
            return
        count = max(1, nbytes // self.dtype.itemsize)
        for start in range(0, self.count, count):
            yield self.slice(start, min(count, self.count - start))


def _is_tensor(owner: object) -> TypeGuard[Tensor]:
    return hasattr(owner, "data_ptr")


def _writing() -> AbstractContextManager[object]:
    """Have torch write into every tensor: a program's may be inference tensors."""
    context: AbstractContextManager[object] = sys.modules["torch"].inference_mode()
    return context


def _flat(tensor: Tensor) -> Tensor:
    """View a tensor as 1-d; a single element may have any strides, which bytes must not."""
    return tensor.view(-1) if tensor.numel() != 1 else tensor.view(()).view(1)


def _learn(dtype: Any) -> DType:
    """Look an element type of numpy's or torch's up by its name."""
    name = str(dtype).removeprefix("torch.")
    try:
        found = DType(name)
    except ValueError:
        raise ValueError(f"elements of {name} cannot be communicated") from None
    _DTYPES[dtype] = found
    return found


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # of a device that is written in Python
        return 0


def _scale_array(array: npt.NDArray[np.generic], dtype: DType, factor: float) -> None:
    if dtype in _FRACTIONAL:
        with np.errstate(all="ignore"):  # loss scalers look for what overflows
            np.multiply(array, factor, out=array)
    elif dtype.is_integer:
        array[:] = np.trunc(array.astype(np.float64) * factor).astype(array.dtype)
    else:
        raise _no_factor(dtype, factor)


def _scale_tensor(tensor: Tensor, dtype: DType, factor: float) -> None:
    if dtype in _FRACTIONAL or dtype.is_half:
        tensor.mul_(factor)
    elif dtype.is_integer:
        tensor.copy_(tensor.double().mul_(factor).trunc_())
    else:
        raise _no_factor(dtype, factor)


def _no_factor(dtype: DType, factor: float) -> ValueError:
    return ValueError(f"a factor of {factor} cannot be applied to {dtype.value}")
