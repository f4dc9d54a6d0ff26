"""Ranks that take themselves to be on different nodes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from hvdtrain.core import context


@contextmanager
def nodes_of_their_own() -> Iterator[None]:
    """Let each rank be on a node of its own when communicators are opened in the block."""
    here = context.current()
    topology = here.topology
    here.topology = replace(topology, node=topology.rank)
    yield
    here.topology = topology
