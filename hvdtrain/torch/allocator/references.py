"""Whether a gradient shares its memory with another tensor that may be read or reduced, too."""

from __future__ import annotations

import sys

import torch

# Of the gradient: in Python, to the tensor, to its storage; and to the tensor that it is a view of.
References = tuple[int, int, int, int]


def count_references(parameter: torch.Tensor, incoming: torch.Tensor | None) -> References:
    """Return how many references there are to a gradient.

    Those that are there in any case are included.
    """
    python = sys.getrefcount(parameter.grad)
    gradient = parameter.grad
    assert gradient is not None
    tensor = gradient._use_count()  # type: ignore[attr-defined]
    storage = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
    if incoming is None or incoming.data_ptr() != gradient.data_ptr():  # it was added or cloned
        return python, tensor, storage + 1, 0
    base = incoming._base
    if base is None:
        return python, tensor, storage, 0
    return python, tensor, storage - 1, base._use_count()  # type: ignore[attr-defined]
