"""What an engine takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.buffer import Buffer
from hvdtrain.types import DType, ReduceOp

__all__ = ["ANY_DEVICE", "Capabilities"]


class _AnyDevice(frozenset[str]):
    """A set that contains every device type; listed as "any"."""

    def __contains__(self, device: object) -> bool:
        return True


ANY_DEVICE = _AnyDevice({"any"})


@dataclass(frozen=True)
class Capabilities:
    """What a communicator supports; the core refuses everything else and never casts.

    Attributes:
        reduces: element types that each reduction supports.
        moves: element types that broadcast, allgather and alltoall support.
        devices: supported device types of buffers ("cpu", "cuda"), or ANY_DEVICE.
        concurrent: whether several communicators may be used at once, each by its own thread.
        half_types: whether half types are reduced in place, and multiplied by factors in float32.
        rounds_once: whether half types are then also added in float32 and rounded once, instead of
            after each addition.
        tree_sums: whether allreduce adds floating-point numbers along a binary tree over the ranks,
            neighbors first and an odd one last, whatever their number and location.
        point_to_point: whether there are messages between pairs of ranks.
    """

    reduces: Mapping[ReduceOp, frozenset[DType]]
    moves: frozenset[DType]
    devices: frozenset[str]
    concurrent: bool
    half_types: bool = False
    rounds_once: bool = True
    tree_sums: bool = False
    point_to_point: bool = False

    def unsupported(self, buffer: Buffer, op: ReduceOp | None = None) -> str | None:
        """Return what about a buffer is not supported, or None if it can be moved or reduced.

        Args:
            buffer: buffer to move, or to reduce.
            op: reduction; None for moving.
        """
        if (
            buffer.device != "cpu"
            and (reason := self.unsupported_device(buffer.device)) is not None
        ):
            return reason
        if op is None:
            return None if buffer.dtype in self.moves else f"moving {buffer.dtype.value}"
        if buffer.dtype not in self.reduces.get(op, frozenset()):
            return f"{op.value} of {buffer.dtype.value}"
        return None

    def unsupported_device(self, device: str) -> str | None:
        """Return why memory on a device ("cuda:0") is not supported, or None if it is."""
        if device.partition(":")[0] in self.devices:
            return None
        return f"memory on {device} (takes {', '.join(sorted(self.devices))})"
