"""Compressors, which round tensors before they are reduced, for all frameworks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Compressor:
    """A compression that leaves tensors as they are; subclasses override its methods."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to reduce instead, and a context for decompress()."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the reduced tensor in its original type.

        Args:
            tensor: reduced tensor, of any shape, in the type of the compressed one.
            ctx: context that compress() has returned.
        """
        return tensor


class Compressions:
    """The compressors of a framework, which round once and add in float32; Horovod lacks bf16.

    Args:
        module: name of the module that has the compressors' classes, for pickle.
        cast: returns a tensor in another element type.
        is_floating: tells whether a tensor has floating-point elements; others are not rounded.
        half, bfloat: the framework's types float16 and bfloat16.
    """

    none = Compressor

    def __init__(
        self,
        module: str,
        cast: Callable[[Any, Any], Any],
        is_floating: Callable[[Any], bool],
        half: object,
        bfloat: object,
    ) -> None:
        def rounding(name: str, kind: str, dtype: object) -> type[Compressor]:
            def compress(tensor: Any) -> tuple[Any, Any]:
                return (
                    (cast(tensor, dtype), tensor.dtype) if is_floating(tensor) else (tensor, None)
                )

            def decompress(tensor: Any, ctx: Any) -> Any:
                return tensor if ctx is None else cast(tensor, ctx)

            methods = {"compress": staticmethod(compress), "decompress": staticmethod(decompress)}
            words = {"__module__": module, "__doc__": f"Rounds floating-point tensors to {kind}."}
            return type(name, (Compressor,), words | methods)

        self.fp16 = rounding("FP16Compressor", "float16", half)
        self.bf16 = rounding("BF16Compressor", "bfloat16", bfloat)

    def name_of(self, compressor: type[Compressor]) -> str:
        """Return "none", "fp16" or "bf16" for one of these compressors, else "own"."""
        names = {self.none: "none", self.fp16: "fp16", self.bf16: "bf16"}
        return names.get(compressor, "own")
