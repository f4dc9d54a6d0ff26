"""A device for torch, written in Python, whose memory the host cannot read: in place of a GPU.

A tensor on it is an ordinary tensor, but the pages at its address are closed. The elements lie in
CPU memory that only hidden_memory knows, where every operator of torch computes. Whatever brings
elements to the host raises HiddenMemoryError (`.cpu()`, `.item()`, `.tolist()`, a copy to a CPU
tensor), numpy's TypeError, or ends the process (a read at the address). Tests, and they alone, may
read in a block of allowed().
"""

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from hidden_memory import DEVICE, elements_behind, is_hidden, new_storage, place_of, set_storage
from paths import TESTS
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

import hvdtrain

# An uninitialised element is no number, or the largest one: nobody can take it for a zero.
_GARBAGE = 0xFF

# Called after each operator, with it, its arguments, those with names, and its result.
observers: list[Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]] = []

# Folders, with the separator that ends them.
_SAMPLING = "weight_sums"  # looks at a few elements of weights now and then
_PRODUCT = os.path.join(os.path.dirname(hvdtrain.__file__), "")
_TESTS = os.path.join(TESTS, "")

_tests_may_read = _product_may_read = False
_writes = 0
_refusals: list[str] = []
_libraries: list[torch.library.Library] = []  # kernels are registered as long as these live


class HiddenMemoryError(AssertionError):
    """The host has read memory of the device; not a RuntimeError, which products may handle."""


def install() -> None:
    if _libraries:
        return
    _setup_privateuseone_for_python_backend(DEVICE, backend_module=_Module())
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(_kernel, "PrivateUse1")
    for op in (*_made_of_others(), *_CONVOLUTIONS):
        aten.impl(op, partial(_kernel, op), "PrivateUse1")
    for lazy in ("Conjugate", "Negative"):  # else a copy makes a copy first, and so on for ever
        aten.impl("_copy_from", torch.library.fallthrough_kernel, lazy)
    _libraries.extend([every, aten])
    _let_storages_be_copied()


class _Module(_DummyBackendModule):
    """torch.hidden."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


@contextmanager
def allowed() -> Iterator[None]:
    """Let tests read the device's memory, on any thread, but nothing that they call of hvdtrain."""
    global _tests_may_read
    before, _tests_may_read = _tests_may_read, True
    try:
        yield
    finally:
        _tests_may_read = before


@contextmanager
def allow_staging() -> Iterator[None]:
    """Let hvdtrain read the device's memory, too, for an engine that takes host memory only."""
    global _product_may_read
    _product_may_read = True
    try:
        with allowed():
            yield
    finally:
        _product_may_read = False


def refusals() -> list[str]:
    """Return what has been refused in this process, for those who swallow errors."""
    return list(_refusals)


def writes() -> int:
    return _writes


def _made_of_others() -> Iterator[Any]:
    """Yield operators that torch else does with `out=`, which has mse_loss warn, for one."""
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        key = "CompositeExplicitAutogradNonFunctional"
        if space == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(full, key):
            packet, _, overload = name.partition(".")
            yield getattr(getattr(torch.ops.aten, packet), overload or "default")


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return target.copy_(source, non_blocking)


def _nothing(*_: object) -> None:
    pass


def _convolution_backward(grad: torch.Tensor, *args: Any) -> Any:
    return torch.ops.aten.convolution_backward(grad, *args[:2], [args[1].shape[0]], *args[2:])


_CONVOLUTIONS: dict[Any, Callable[..., object]] = {
    torch.ops.aten.convolution_overrideable.default: torch.ops.aten.convolution,
    torch.ops.aten.convolution_backward_overrideable.default: _convolution_backward,
}

# What torch has for such devices only, said as on the CPU.
_ON_CPU: dict[Any, Callable[..., object]] = {
    **_CONVOLUTIONS,
    torch.ops.aten._copy_from.default: _copy,
    torch.ops.aten.record_stream.default: _nothing,
}


# Not all overloads take the numbers that torch itself takes for tensors of one element.
def _is_number_for_tensor(parameter: Any, value: object) -> bool:
    return isinstance(value, (int, float, complex)) and str(parameter.type) == "Tensor"


def _is_allowed() -> bool:
    """Return whether it is a test that reads: by the nearest caller that is a test's or hvdtrain's.

    torch and Python's own modules read for whoever calls them. What is printed is no staging.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path == torch._tensor_str.__file__:
            return True
        if path.startswith(_PRODUCT):
            return _product_may_read or frame.f_code.co_name == _SAMPLING
        if path.startswith(_TESTS) and path != __file__:
            return _tests_may_read
        frame = frame.f_back
    return False


class _Call:
    def __init__(self, op: Any) -> None:
        self._op = op
        # As on a GPU: scalars, copies, and indices, which are copied.
        self._takes_host_memory = op.overloadpacket.__name__.startswith(("_copy_from", "index"))
        self._storages: dict[int, torch.UntypedStorage] = {}  # by that behind it
        self._arguments: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by that behind it
        self._usual: set[int] = set()  # what lies behind tensors that are no inference tensors

    def behind(self, arguments: Any) -> Any:
        return tree_map(self._behind, arguments)

    def _behind(self, value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == DEVICE:
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor):
            return value
        if not is_hidden(value):
            return self._from_host(value)
        elements = elements_behind(value)
        self._storages[elements.untyped_storage()._cdata] = value.untyped_storage()
        if not value.is_inference():
            self._usual.add(elements.untyped_storage()._cdata)
        self._arguments[id(elements)] = value, elements
        return elements

    def _from_host(self, value: torch.Tensor) -> torch.Tensor:
        if value.dim() and not self._takes_host_memory:
            raise RuntimeError(
                f"{self._op}: expected all tensors on {DEVICE!r}, got one on the CPU"
            )
        return value

    def follow(self) -> None:
        for tensor, elements in self._arguments.values():
            storage = self._storage(elements)
            if storage is not tensor.untyped_storage() or place_of(tensor) != place_of(elements):
                set_storage(tensor, storage, *place_of(elements))

    def shown(self, elements: torch.Tensor) -> torch.Tensor:
        if id(elements) in self._arguments:
            return self._arguments[id(elements)][0]
        # A view of what is no inference tensor is none either.
        of_usual = elements.untyped_storage()._cdata in self._usual
        with torch.inference_mode(torch.is_inference_mode_enabled() and not of_usual):
            tensor = torch._C._acc.create_empty_tensor((0,), elements.dtype)
        return set_storage(tensor, self._storage(elements), *place_of(elements))

    def _storage(self, elements: torch.Tensor) -> torch.UntypedStorage:
        behind = elements.untyped_storage()
        known = self._storages.get(behind._cdata)
        if known is None or known.nbytes() != behind.nbytes():
            known = self._storages[behind._cdata] = new_storage(behind)
        return known


def _kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the elements behind its arguments."""
    _refuse_reads(op, args)
    _count_writes(op)
    if op is torch.ops.aten.set_.source_Storage_storage_offset:
        return set_storage(*args)
    call, behind = _Call(op), _ON_CPU.get(op, op)
    if any(_is_number_for_tensor(*pair) for pair in zip(op._schema.arguments, args, strict=False)):
        behind = op.overloadpacket
    with torch.no_grad():
        result = behind(*call.behind(args), **call.behind(kwargs))
        if op.overloadpacket.__name__.startswith("empty"):
            tree_map_only(torch.Tensor, _spoil, result)
        call.follow()
        shown = tree_map_only(torch.Tensor, call.shown, result)
    for observe in observers:
        observe(op, args, kwargs, shown)
    return shown


def _count_writes(op: Any) -> None:
    global _writes
    written = any(a.alias_info and a.alias_info.is_write for a in op._schema.arguments)
    _writes += written or op is torch.ops.aten._copy_from.default


def _refuse_reads(op: Any, args: tuple[Any, ...]) -> None:
    copies = op is torch.ops.aten._copy_from.default and not is_hidden(args[1])
    answers = {str(value.type) for value in op._schema.returns} & {"number", "bool", "int"}
    if (copies or answers) and not _is_allowed():
        _refuse(f"{op} reads memory of device {DEVICE!r} from the host")


def _refuse(text: str) -> None:
    _refusals.append(text)
    if threading.current_thread() is not threading.main_thread():
        # torch cannot hand on what is raised in a backward pass on a device in Python: it asks
        # the device for its type while it unwinds, and ends the process without a word.
        traceback.print_stack()
        print(text, file=sys.stderr, flush=True)
    raise HiddenMemoryError(text)


def _spoil(elements: torch.Tensor) -> torch.Tensor:
    torch.empty(0, dtype=torch.uint8, device="cpu").set_(elements.untyped_storage()).fill_(_GARBAGE)
    return elements


def _let_storages_be_copied() -> None:
    """Give copy.deepcopy() what it calls; torch's own ends the process on devices in Python."""
    usual: Callable[[Any], Any] = torch.UntypedStorage.clone

    def clone(storage: Any) -> Any:
        here = storage.device.type == DEVICE
        return new_storage(storage.behind.clone()) if here else usual(storage)

    torch.UntypedStorage.clone = clone  # type: ignore[method-assign]
