"""Ports that no connection takes before the server is there."""

from __future__ import annotations

import random
import socket
import time
from pathlib import Path

from hvdtrain.launch.cluster_environment import free_port, free_ports


def a_server() -> socket.socket:
    """Open a server on a free port, unless another test is faster: then on another one."""
    deadline = time.monotonic() + 300
    while True:
        try:
            return socket.create_server(("127.0.0.1", free_port()))
        except OSError:
            if time.monotonic() > deadline:
                raise


def test_a_port_below_those_of_connections() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = set()
    for _ in range(20):
        random.seed(1)
        ports.add(free_port("127.0.0.1"))
    assert len(ports) > 1
    assert max(ports) < first or first <= 15_000
    with a_server() as server:
        assert free_port("127.0.0.1") != server.getsockname()[1]
    assert len(set(free_ports(200, "127.0.0.1"))) == 200
