"""Opening the world that an engine has joined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hvdtrain.collective import collective
from hvdtrain.config import Config
from hvdtrain.core.collectives.ordered import OrderedCommunicator
from hvdtrain.core.membership.world import Context, FailureWatch, make_channel
from hvdtrain.core.stall.watch import pending_on, watch_stalls
from hvdtrain.engines.communicator import Communicator, EngineWorld
from hvdtrain.topology import Topology


@collective
def open_context(
    config: Config,
    world: EngineWorld,
    ordered: bool,
    failed: Callable[[str], None],
) -> Context:
    """Open the channel of a world."""
    communicator, failures = world.communicator, world.failures
    topology = Topology.from_nodes(communicator.rank, world.nodes, world.hostnames)
    # Ranks on other hosts may not have the first one's environment.
    settings = np.array([ordered, config.min_ranks, config.max_ranks], np.uint64)
    communicator.start_max(settings).wait()
    in_order, least, most = settings.tolist()
    config = replace(config, min_ranks=least, max_ranks=most)
    chosen = OrderedCommunicator(communicator) if in_order else communicator
    channel = make_channel(chosen, range(topology.size), topology, "world", failed, failures)
    return Context(
        config, world.engine, world.library, topology, channel, failed, bool(in_order), failures
    )


@collective
def start_watches(here: Context, communicator: Communicator, abort: Callable[[int], None]) -> None:
    """Start the watches of a world whose channel is not in use yet."""
    if here.failures is not None and here.topology.size > 1:
        here.failure_watch = FailureWatch(here.failures)
    here.watch = watch_stalls(
        communicator,
        here.config,
        here.topology,
        lambda: pending_on(here.channels(), here.blocked),
        abort,
    )
