"""How tensors are changed before they are reduced, for every framework."""

from __future__ import annotations

from typing import Any

__all__ = ["Compressor"]


class Compressor:
    """Leaves tensors as they are; subclasses change `compress` and `decompress`."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return what is reduced instead of the tensor, and what decompress() needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the reduced tensor in its own type."""
        return tensor
