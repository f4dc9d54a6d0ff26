"""What a channel does while nobody submits anything."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from hvdtrain.core.channel import Channel
from hvdtrain.core.collectives.gathers import Barrier
from hvdtrain.core.shadow import shadow
from hvdtrain.engines.communicator import Pending
from hvdtrain.engines.local_engine import LocalCommunicator


class CountingCommunicator(LocalCommunicator):
    """A communicator of one that may be used by a thread, and counts its rounds."""

    capabilities = replace(LocalCommunicator.capabilities, concurrent=True)
    rounds = 0

    def start_max(self, values: npt.NDArray[np.uint64]) -> Pending:
        self.rounds += 1
        return super().start_max(values)


def test_members_that_only_listen_rest_between_rounds() -> None:
    communicator = CountingCommunicator()
    channel = Channel(communicator, [0], "[rank 0/1]", shadow, "world")
    for _ in range(3):
        channel.run(Barrier())
    before = communicator.rounds
    channel.listen(lambda: None)
    time.sleep(0.1)
    channel.listen(None)
    assert 0 < communicator.rounds - before < 50  # without a rest it is thousands
    channel.close()
