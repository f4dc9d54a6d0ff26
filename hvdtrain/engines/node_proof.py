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


def prove_nodes(allgather: Callable[[Any], list[Any]]) -> tuple[int, ...] | None:
    """Number the nodes: ranks get the same number exactly if they can read one another.

    Each rank writes a random nonce into a memfd and announces where it is; a rank belongs to
    the node of the lowest rank whose nonce it reads there, through /proc.

    Args:
        allgather: gathers one picklable value of every rank, by rank (collective).

    Returns:
        A number for each rank, or None if a rank cannot have a memfd (no Linux, or forbidden).
    """
    descriptor, nonce = _memfd(), secrets.token_bytes(_NONCE_BYTES)
    try:
        if descriptor is not None:
            os.write(descriptor, nonce)
        announced = allgather((os.getpid(), descriptor, nonce))
        node = next(
            rank
            for rank, (pid, fd, secret) in enumerate(announced)
            if secret == nonce or _reads(pid, fd, secret)
        )
        nodes = tuple(allgather(node))
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return None if any(fd is None for _, fd, _ in announced) else nodes


def _memfd() -> int | None:
    try:
        return os.memfd_create(_NAME)
    except (AttributeError, OSError):
        return None


def _reads(pid: int, descriptor: int | None, nonce: bytes) -> bool:
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        # In another PID namespace this is somebody else's file; opening a pipe would block.
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return False
        with open(path, "rb") as memory:
            return memory.read(_NONCE_BYTES) == nonce
    except OSError:
        return False
