"""Which ranks share memory, proved by reading it.

Neither host names nor MPI's own word can be trusted: schedulers start two daemons on one
machine, containers on one host may see nothing of each other, and launchers name hosts freely.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.control_groups import read_file
from hvdtrain.engines.shared_memory.system_errors import Objection, objection_to, settle

__all__ = ["machine", "prove_nodes", "unreadable_peers"]

_NAME = "hvdtrain-node"
_NONCE_BYTES = 16  # twice as many digits


def prove_nodes(allgather: Callable[[Any], list[Any]]) -> tuple[int, ...] | str:
    """Number the nodes: ranks get the same number exactly if they can read one another.

    Each rank writes a random nonce into a memfd and announces where it is; a rank belongs to
    the node of the lowest rank whose nonce it reads there, through /proc.

    Args:
        allgather: gathers one value of every rank, which JSON can hold, by rank (collective).

    Returns:
        A number for each rank, or, if a rank cannot have a memfd (no Linux, or forbidden), what
        the system said.

    Raises:
        SystemLimitError: a rank has no descriptor left for it (on every rank).
    """
    nonce = secrets.token_hex(_NONCE_BYTES)
    descriptor, objection = _memfd(nonce)
    try:
        announced = allgather((os.getpid(), descriptor, nonce, objection))
        if reason := settle(said for *_, said in announced):
            return reason
        node, objection = _first_read([place for *place, _ in announced], nonce)
        told = allgather((node, objection))
    finally:
        if descriptor is not None:
            os.close(descriptor)
    settle(said for _, said in told)
    return tuple(node for node, _ in told)


def machine() -> tuple[str, str]:
    """Return what two ranks on different machines do not share: its start, and its name (local)."""
    return read_file(Path("/proc/sys/kernel/random/boot_id")) or "", socket.gethostname()


def unreadable_peers(nodes: Sequence[int], machines: Sequence[tuple[str, str]]) -> str:
    """Return which ranks of one machine do not read one another, "" for none (local).

    Containers with host names of their own are taken for what they are meant to be: nodes.

    Args:
        nodes: of prove_nodes().
        machines: of machine(), of every rank.
    """
    for rank, (node, where) in enumerate(zip(nodes, machines, strict=True)):
        first = machines.index(where)
        if where[0] and node != nodes[first]:
            return (
                f"rank {first} and rank {rank}, both on {where[1]}, cannot read each other's files "
                "in /proc: have one user start them, in one container, and without hidepid"
            )
    return ""


def _memfd(nonce: str) -> tuple[int | None, Objection]:
    try:
        descriptor = os.memfd_create(_NAME)
    except (AttributeError, OSError) as error:
        return None, objection_to(error, "memfd_create")
    os.write(descriptor, nonce.encode())
    return descriptor, Objection()


def _first_read(announced: list[list[Any]], own: str) -> tuple[int, Objection]:
    """Return the lowest rank whose nonce can be read, and which limit kept it from being read."""
    for rank, (process, descriptor, nonce) in enumerate(announced):
        try:
            if nonce == own or _reads(process, descriptor, nonce):
                return rank, Objection()
        except OSError as error:
            objection = objection_to(error, "reading a peer's memory")
            # Any other error is another node, or one that behaves like it.
            if objection.limit:
                return rank, objection
    raise AssertionError("a rank finds its own nonce")


def _reads(process: int, descriptor: int, nonce: str) -> bool:
    path = f"/proc/{process}/fd/{descriptor}"
    # In another PID namespace this is somebody else's file; opening a pipe would block.
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        return False
    with open(path, "rb") as memory:
        return memory.read(2 * _NONCE_BYTES) == nonce.encode()
