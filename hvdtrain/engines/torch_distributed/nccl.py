"""Creation of the NCCL group of a communicator (RCCL on AMD GPUs)."""

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

from hvdtrain.collective import collective
from hvdtrain.engines.torch_distributed.backend import Backend
from hvdtrain.engines.torch_distributed.groups import Members, nccl_group
from hvdtrain.engines.torch_distributed.types import GLOO_WIDE, NCCL_WIDE
from hvdtrain.errors import UnsupportedError

Record = npt.NDArray[np.uint8]

_DIGEST_BYTES = 16


@collective
def connect(
    members: Members, device: torch.device, gather: Callable[[Record], npt.NDArray[np.uint8]]
) -> Backend:
    """Connect the members' GPUs.

    Args:
        gather: function that gathers a [n] uint8 record per member, in rank order.
    """
    own = np.frombuffer(_digest(device) + bytes([members.halves_in_float32]), np.uint8)
    records = gather(own).reshape(members.size, -1)
    _require_own_devices([record[:_DIGEST_BYTES].tobytes() for record in records], members, device)
    # Work on the GPU may depend on other ranks, which must not wait for this rank's allocations.
    torch.cuda.synchronize(device)
    group = nccl_group(members, device)
    wide = GLOO_WIDE if records[:, _DIGEST_BYTES].any() else NCCL_WIDE
    make: Any = getattr(dist, "_make_nccl_premul_sum")  # noqa: B009  # not in CPU builds
    return Backend(group, wide, premultiplied=make, even=True)


def _digest(device: torch.device) -> bytes:
    """Return a digest that is equal for ranks whose GPU NCCL considers the same."""
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
