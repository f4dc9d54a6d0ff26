"""Ports that no connection takes before the server is there."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from hvdtrain.launch.ports import free_port, free_ports


def test_a_port_below_those_of_connections() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = set()
    for _ in range(20):
        random.seed(1)
        ports.add(free_port("127.0.0.1"))
    assert len(ports) > 1
    assert max(ports) < first or first <= 15_000
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert free_port("127.0.0.1") != port
    assert len(set(free_ports(200, "127.0.0.1"))) == 200
