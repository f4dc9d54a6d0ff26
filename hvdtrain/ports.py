"""Ports of this host."""

from __future__ import annotations

import socket

__all__ = ["free_port"]


def free_port() -> int:
    """Return a TCP port that no process on this host uses at this moment (local)."""
    with socket.socket() as probe:  # which never listens
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
