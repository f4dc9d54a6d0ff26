"""Which ranks share memory, proved by reading it.

Neither host names nor MPI's own word can be trusted: schedulers start two daemons on one
machine, containers on one host may see nothing of each other, and launchers name hosts freely.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Any

__all__ = ["prove_nodes"]

_NAME = "hvdtrain-node"
_NONCE_BYTES = 16


def prove_nodes(allgather: Callable[[Any], list[Any]]) -> tuple[int, ...]:
    """Number the nodes: ranks get the same number exactly if they can read one another.

    Each rank writes a random nonce into a memfd and announces where it is; a rank belongs to
    the node of the lowest rank whose nonce it reads there, through /proc.

    Args:
        allgather: gathers one picklable value of every rank, by rank (collective).

    Raises:
        OSError: this system has no memfd (it is not Linux).
    """
    descriptor = os.memfd_create(_NAME)
    try:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        os.write(descriptor, nonce)
        announced = allgather((os.getpid(), descriptor, nonce))
        node = next(
            rank
            for rank, (pid, fd, secret) in enumerate(announced)
            if secret == nonce or _reads(pid, fd, secret)
        )
        return tuple(allgather(node))
    finally:
        os.close(descriptor)


def _reads(pid: int, descriptor: int, nonce: bytes) -> bool:
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        # In another PID namespace this is somebody else's file; opening a pipe would block.
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return False
        with open(path, "rb") as memory:
            return memory.read(_NONCE_BYTES) == nonce
    except OSError:
        return False
