"""How the ranks of a communicator connect their GPUs with NCCL (RCCL on AMD's)."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from hvdtrain.engines.torch_distributed.backend import Backend
from hvdtrain.engines.torch_distributed.groups import Members, nccl_group
from hvdtrain.engines.torch_distributed.types import GLOO_WIDE, NCCL_WIDE
from hvdtrain.errors import UnsupportedError

__all__ = ["connect"]

Record = npt.NDArray[np.uint8]

_DIGEST_BYTES = 16


def connect(
    members: Members, device: torch.device, gather: Callable[[Record], npt.NDArray[np.uint8]]
) -> Backend:
    """Connect the members' GPUs (collective).

    Args:
        members: who they are.
        device: of this rank.
        gather: gathers a record of every member, by rank (collective).

    Raises:
        UnsupportedError: two of them have one GPU (on all of them).
    """
    own = np.frombuffer(_digest(device) + bytes([members.halves_in_float32]), np.uint8)
    records = gather(own).reshape(members.size, -1)
    _require_own_devices([record[:_DIGEST_BYTES].tobytes() for record in records], members, device)
    # What runs on the GPU may wait for other ranks, which must not wait for memory of this one.
    torch.cuda.synchronize(device)
    group = nccl_group(members)
    # NCCL would else connect in the midst of the first operation.
    group.eager_connect_single_device(device)
    wide = GLOO_WIDE if records[:, _DIGEST_BYTES].any() else NCCL_WIDE
    make: Any = getattr(dist, "_make_nccl_premul_sum")  # noqa: B009  # not in a build for the CPU
    return Backend(group, wide, premultiplied=make, even=True)


def _digest(device: torch.device) -> bytes:
    """Return what is equal for ranks that have one GPU, in NCCL's own eyes."""
    host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    uuid = torch.cuda.get_device_properties(device).uuid
    return blake2b(f"{host} {uuid}".encode(), digest_size=_DIGEST_BYTES).digest()


def _require_own_devices(digests: list[bytes], members: Members, device: torch.device) -> None:
    for rank, digest in enumerate(digests):
        if (first := digests.index(digest)) != rank:
            raise UnsupportedError(
                f"[rank {members.rank}/{members.size}] engine nccl: ranks {first} and {rank} have "
                f"the same GPU (here {device}): call torch.cuda.set_device(hvd.local_rank()) "
                "before anything is put on a GPU, start one rank for each GPU, or use engine mpi"
            )
