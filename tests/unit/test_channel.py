"""What a channel does while nobody submits anything, and when an operation ends."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.core.channel import Channel
from hvdtrain.core.collectives.gathers import Barrier
from hvdtrain.core.collectives.step import Step, StepState, step_request
from hvdtrain.core.shadow import shadow
from hvdtrain.engines.local_engine import LocalCommunicator, _Done
from hvdtrain.types import ReduceOp


class CountingCommunicator(LocalCommunicator):
    """A communicator of one that may be used by a thread, and counts its rounds."""

    capabilities = replace(LocalCommunicator.capabilities, concurrent=True)
    rounds = 0

    def start_max(self, values: npt.NDArray[np.uint64]) -> _Done:
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


def test_a_program_goes_on_only_when_it_may_submit_the_next_step() -> None:
    channel = Channel(CountingCommunicator(), [0], "[rank 0/1]", shadow, "plan")
    numbers = Buffer.from_array(np.ones(1, np.int32))
    state = StepState([], numbers, ReduceOp.AVERAGE, weight=None)
    step = Step(state, step_request("digest", [], 1, ReduceOp.AVERAGE))
    state.added.add_done_callback(lambda _: under_way.append(step.request.key in channel._pending))
    under_way: list[bool] = []
    channel.run(step)
    assert under_way == [False]
    channel.close()
