"""Flat memory on the host or a device, as engines communicate it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeAlias, TypeGuard

import numpy as np

from hvdtrain.types import DType

_FRACTIONAL = frozenset({DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128})
# Cache keyed by numpy's and torch's dtypes; looking one up by its name is slow.
_DTYPES: dict[object, DType] = {}


class Tensor(Protocol):
    """The part of torch.Tensor that is used here, where torch is not imported."""

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


# The elements of a buffer.
Elements: TypeAlias = np.ndarray[Any, np.dtype[Any]] | Tensor


# Not frozen, which would triple the time to create one.
@dataclass(slots=True)
class Buffer:
    """Contiguous elements in memory.

    Attributes:
        pointer: address of the first element; 0 on a device whose memory has no addresses.
        dtype: element type.
        count: number of elements.
        device: device of the memory, as "cpu" or "cuda:0".
        owner: object that keeps the memory alive. If it is a torch tensor, its elements are exactly
            those of the buffer.
    """

    pointer: int
    dtype: DType
    count: int
    device: str = "cpu"
    owner: object = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, elements: Elements, dtype: DType | None = None) -> Buffer:
        """Return a buffer over a C-contiguous array or contiguous torch tensor, without a copy.

        Args:
            elements: array or tensor of any shape.
            dtype: element type if numpy lacks it (bfloat16, as uint16); by default that of the
                array or tensor.

        Raises:
            ValueError: the memory is not contiguous, or its dtype is not in DType.
        """
        if isinstance(elements, np.ndarray):
            return cls.from_array(elements, dtype)
        if not elements.is_contiguous():
            raise ValueError(f"a Buffer needs contiguous memory, got strides {elements.stride()}")
        tensor = elements.detach() if elements.requires_grad else elements
        own = _DTYPES.get(tensor.dtype) or _look_up(tensor.dtype)
        device = "cpu" if tensor.is_cpu else str(tensor.device)
        return cls(_address(tensor), own, tensor.numel(), device, tensor)

    @classmethod
    def from_array(cls, array: np.typing.NDArray[np.generic], dtype: DType | None = None) -> Buffer:
        """Return a buffer over a C-contiguous array; see `of`."""
        if not array.flags.c_contiguous:
            raise ValueError(f"a Buffer needs C-contiguous memory, got strides {array.strides}")
        own = dtype or _DTYPES.get(array.dtype) or _look_up(array.dtype)
        return cls(array.ctypes.data, own, array.size, owner=array)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * self.dtype.itemsize

    def elements(self) -> Elements:
        """Return the elements as a writable 1-d view: a torch tensor if it owns them, else numpy's.

        numpy represents bfloat16 as uint16.
        """
        owner = self.owner
        return _flat(owner) if _is_tensor(owner) else self.array()

    def array(self) -> np.typing.NDArray[np.generic]:
        """Return the elements as a writable 1-d numpy view, with bfloat16 as uint16.

        Raises:
            ValueError: the memory is not on the host.
        """
        if self.device != "cpu":
            raise ValueError(f"numpy cannot access memory on {self.device}")
        if self.count == 0:
            return np.empty(0, self.dtype.numpy)
        memory = (ctypes.c_byte * self.nbytes).from_address(self.pointer)
        memory.owner = self.owner  # type: ignore[attr-defined]  # keeps it alive as long as the array
        return np.frombuffer(memoryview(memory), self.dtype.numpy)

    def host(self) -> Buffer:
        """Return a view of the memory without its tensor, for engines that compute with numpy.

        torch would start as many threads as the program uses, and compete with them.

        Raises:
            ValueError: the memory is not on the host.
        """
        if self.device != "cpu":
            raise ValueError(f"memory on {self.device} is not the host's")
        return Buffer(self.pointer, self.dtype, self.count, owner=self)

    def like(self, count: int) -> Buffer:
        """Allocate `count` uninitialized elements of the same type, kind of memory and device."""
        owner = self.owner
        if _is_tensor(owner):
            return Buffer.of(owner.new_empty((count,)))
        return Buffer.from_array(np.empty(count, self.dtype.numpy), self.dtype)

    def view(self, dtype: DType) -> Buffer:
        """Return a view of the same memory as elements of another type.

        Raises:
            ValueError: the size is not a multiple of the new element size.
        """
        count, rest = divmod(self.nbytes, dtype.itemsize)
        if rest:
            raise ValueError(f"{self.nbytes} bytes are not a multiple of the size of {dtype.value}")
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
            ValueError: the device, type or size of the buffers differ.
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

        Integers are multiplied in float64 and truncated, half types in tensors in float32.

        Raises:
            ValueError: the elements are bool, or of a half type in numpy's memory.
        """
        if factor == 1.0:
            return
        if _is_tensor(self.owner):
            with _writing():
                if self.dtype in _FRACTIONAL or self.dtype.is_half:
                    self.owner.mul_(factor)
                elif self.dtype.is_integer:
                    self.owner.copy_(self.owner.double().mul_(factor).trunc_())
                else:
                    raise _no_factor(self.dtype, factor)
        else:
            array = self.array()
            if self.dtype in _FRACTIONAL:
                with np.errstate(all="ignore"):  # loss scalers check for overflow
                    np.multiply(array, factor, out=array)
            elif self.dtype.is_integer:
                array[:] = np.trunc(array.astype(np.float64) * factor).astype(array.dtype)
            else:
                raise _no_factor(self.dtype, factor)

    def slice(self, start: int, count: int) -> Buffer:
        """Return a view of part of the elements.

        Raises:
            ValueError: the part is not within the buffer.
        """
        if start < 0 or count < 0 or start + count > self.count:
            raise ValueError(f"slice {start}+{count} is outside a buffer of {self.count} elements")
        address = self.pointer + start * self.dtype.itemsize if self.pointer else 0
        owner: object = self
        if _is_tensor(self.owner):
            owner = _flat(self.owner).narrow(0, start, count)
        return Buffer(address, self.dtype, count, self.device, owner)

    def pieces(self, nbytes: int) -> Iterator[Buffer]:
        """Yield views of at most `nbytes`, but at least one element; none for an empty buffer."""
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
    """Return a context in which torch can write into all tensors, also inference tensors."""
    context: AbstractContextManager[object] = sys.modules["torch"].inference_mode()
    return context


def _flat(tensor: Tensor) -> Tensor:
    """View a tensor as 1-d with stride 1; a single element may have any strides."""
    return tensor.view(-1) if tensor.numel() != 1 else tensor.view(()).view(1)


def _look_up(dtype: Any) -> DType:
    """Look up a dtype of numpy or torch by its name, and cache it."""
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
    except RuntimeError:  # a device implemented in Python
        return 0


def _no_factor(dtype: DType, factor: float) -> ValueError:
    return ValueError(f"a factor of {factor} cannot be applied to {dtype.value}")
