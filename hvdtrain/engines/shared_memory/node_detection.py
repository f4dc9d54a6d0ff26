"""Detection of the ranks that share memory, by reading each other's.

Neither host names nor MPI's information are reliable: schedulers start two daemons on one machine,
containers on one host may be isolated from each other, and launchers choose host names freely.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.control_groups import read_file
from hvdtrain.engines.features import GatherBytes
from hvdtrain.engines.shared_memory.memory import (
    SystemFailure,
    agree_on_failure,
    failure_from_error,
)

_NAME = "hvdtrain-node"
_NONCE_BYTES = 16  # written as 32 hexadecimal digits


def detect_nodes(allgather: GatherBytes) -> tuple[int, ...] | str:
    """Number the nodes: two ranks get the same number if they can read each other's memory.

    Each rank writes a random nonce into a memfd and announces its location. A rank belongs to the
    node of the lowest rank whose nonce it can read through /proc.
    """
    nonce = secrets.token_hex(_NONCE_BYTES)
    descriptor, failure = _memfd(nonce)
    try:
        announced = allgather((os.getpid(), descriptor, nonce, failure))
        if reason := agree_on_failure(failure for *_, failure in announced):
            return reason
        node, failure = _first_readable([source for *source, _ in announced], nonce)
        results = allgather((node, failure))
    finally:
        if descriptor is not None:
            os.close(descriptor)
    agree_on_failure(failure for _, failure in results)
    return tuple(node for node, _ in results)


def machine_identity() -> tuple[str, str]:
    """Return the boot ID and the host name of this machine."""
    return read_file(Path("/proc/sys/kernel/random/boot_id")) or "", socket.gethostname()


def unreadable_peers(nodes: Sequence[int], machines: Sequence[tuple[str, str]]) -> str:
    """Describe two ranks of one machine that cannot read each other's memory; "" for none.

    Containers with their own host names are considered nodes, as intended by their user.
    """
    for rank, (node, where) in enumerate(zip(nodes, machines, strict=True)):
        first = machines.index(where)
        if where[0] and node != nodes[first]:
            return (
                f"rank {first} and rank {rank}, both on {where[1]}, cannot read each other's files "
                "in /proc: have one user start them, in one container, and without hidepid"
            )
    return ""


def _memfd(nonce: str) -> tuple[int | None, SystemFailure]:
    try:
        descriptor = os.memfd_create(_NAME)
    except (AttributeError, OSError) as error:
        return None, failure_from_error(error, "memfd_create")
    os.write(descriptor, nonce.encode())
    return descriptor, SystemFailure()


def _first_readable(
    announced: Sequence[tuple[int, int, str]], own: str
) -> tuple[int, SystemFailure]:
    """Return the lowest rank whose nonce can be read, and the limit that prevented reading it."""
    for rank, (process, descriptor, nonce) in enumerate(announced):
        try:
            if nonce == own or _reads(process, descriptor, nonce):
                return rank, SystemFailure()
        except OSError as error:
            failure = failure_from_error(error, "reading a peer's memory")
            # Any other error means another node, or a process isolated like one.
            if failure.limit:
                return rank, failure
    raise AssertionError("a rank finds its own nonce")


def _reads(process: int, descriptor: int, nonce: str) -> bool:
    path = f"/proc/{process}/fd/{descriptor}"
    # In another PID namespace this is another process's file; opening a pipe would block.
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        return False
    with open(path, "rb") as memory:
        return memory.read(2 * _NONCE_BYTES) == nonce.encode()
