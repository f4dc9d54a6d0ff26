"""The memory of the tests' device: addresses that cannot be read, and elements behind them."""

import ctypes
import mmap
import threading
from collections.abc import Callable
from typing import Any

import torch

DEVICE = "hidden"

_RESERVED_BYTES = 1 << 40
_ALIGNED_BYTES = 512  # as CUDA's allocator


def is_hidden(tensor: torch.Tensor) -> bool:
    return tensor.device.type == DEVICE


def elements_behind(tensor: torch.Tensor) -> torch.Tensor:
    storage: Any = tensor.untyped_storage()
    elements = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
        storage.behind, tensor.storage_offset(), tensor.size(), tensor.stride()
    )
    elements = elements.conj() if tensor.is_conj() else elements
    return elements._neg_view() if tensor.is_neg() else elements


def place_of(tensor: torch.Tensor) -> tuple[int, list[int], list[int]]:
    """Return where in its storage a tensor lies: start, sizes and strides, in elements."""
    return int(tensor.storage_offset()), list(tensor.size()), list(tensor.stride())


# torch's own function, which looks at no element, but is registered for its own devices only.
def set_storage(tensor: torch.Tensor, *place: Any) -> torch.Tensor:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    operator: Any = torch.ops.aten.set_.source_Storage_storage_offset
    result: torch.Tensor = operator.redispatch(keys, tensor, *place)
    return result


def new_storage(behind: torch.UntypedStorage) -> torch.UntypedStorage:
    """Make memory of the device with these bytes behind it, which live as long."""
    size = behind.nbytes()
    make: Callable[..., Any] = torch._C._construct_storage_from_data_pointer
    storage = make(_addresses.take(size), torch.device(DEVICE, 0), size)
    storage.behind = behind
    result: torch.UntypedStorage = storage
    return result


class _Addresses:
    """Addresses that are nobody else's and cannot be read; none is given out twice."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = self._end = 0

    def take(self, nbytes: int) -> int:
        """Return the first of so many; 0, like CUDA, for none."""
        if nbytes == 0:
            return 0
        with self._lock:
            if self._next + nbytes > self._end:
                self._next = _closed_pages(_RESERVED_BYTES)
                self._end = self._next + _RESERVED_BYTES
            address = self._next
            self._next += -(-nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return address


_addresses = _Addresses()


def _closed_pages(nbytes: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    closed = 0  # PROT_NONE
    address: int = libc.mmap(None, nbytes, closed, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return address
