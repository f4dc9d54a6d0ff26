"""One call of an operator on the tests' device: its tensors there, and what lies behind them."""

from __future__ import annotations

from typing import Any

import torch
from hidden_memory import DEVICE, elements_behind, is_hidden, new_storage, place_of, set_storage
from torch.utils._pytree import tree_map


class Call:
    """The tensors of one call of an operator, on the device and behind it."""

    def __init__(self, op: Any) -> None:
        self._op = op
        # As on a GPU: scalars, copies, and indices, which are copied.
        self._takes_host_memory = op.overloadpacket.__name__.startswith(("_copy_from", "index"))
        self._storages: dict[int, torch.UntypedStorage] = {}  # by that behind it
        self._arguments: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by that behind it
        self._usual: set[int] = set()  # what lies behind tensors that are no inference tensors

    def behind(self, arguments: Any) -> Any:
        """Return arguments with what lies behind in place of what is on the device."""
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
        """Give arguments the shape that the operator has given to what lies behind them."""
        for tensor, elements in self._arguments.values():
            storage = self._storage(elements)
            if storage is not tensor.untyped_storage() or place_of(tensor) != place_of(elements):
                set_storage(tensor, storage, *place_of(elements))

    def shown(self, elements: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the device that these elements lie behind."""
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
