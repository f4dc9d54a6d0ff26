"""What a channel does while nobody submits anything, and when an operation ends."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.exchanges import allreduce
from hvdtrain.core.gradients.reducer import step_request
from hvdtrain.core.gradients.step import GradientStep
from hvdtrain.core.membership.world import answer_with_zeros
from hvdtrain.engines.local import LocalCommunicator, _Done
from hvdtrain.types import ReduceOp

# A limit that only ends a hang.
HANGS_AFTER_SECONDS = 300


class CountingCommunicator(LocalCommunicator):
    """A communicator of one that may be used by a thread, and counts its rounds."""

    capabilities = replace(LocalCommunicator.capabilities, concurrent=True)
    rounds = 0

    def start_max(self, values: npt.NDArray[np.uint64]) -> _Done:
        self.rounds += 1
        return super().start_max(values)


def _step(buckets: list[Buffer], op: ReduceOp) -> GradientStep:
    exchange = allreduce.AllreduceExchange(op)
    step = GradientStep(buckets, Buffer.from_array(np.ones(1, np.int32)), exchange)
    step.request = step_request("plan", "digest", buckets, 1, exchange)
    return step


def test_a_program_goes_on_only_when_it_may_submit_the_next_step() -> None:
    channel = Channel(CountingCommunicator(), [0], "[rank 0/1]", answer_with_zeros, "plan")
    step = _step([], ReduceOp.AVERAGE)
    step.added.add_done_callback(lambda _: under_way.append(len(channel.queue) > 0))
    under_way: list[bool] = []
    channel.run(step)
    assert under_way == [False]
    channel.close()


def test_a_channel_that_is_closed_in_the_middle_of_a_step() -> None:
    channel = Channel(CountingCommunicator(), [0], "[rank 0/1]", answer_with_zeros, "plan")
    buckets = [Buffer.from_array(np.full(2, 3.0)) for _ in range(3)]
    step = _step(buckets, ReduceOp.SUM)
    channel.submit(step, at_once=True)
    step.launch()
    step.reduced[0].result()
    waiting = threading.Thread(target=channel.wait, args=[step], daemon=True)
    closing = threading.Thread(target=channel.close, daemon=True)
    for thread in (waiting, closing):
        thread.start()
    for thread in (waiting, closing):
        thread.join(HANGS_AFTER_SECONDS)
        assert not thread.is_alive()
    assert step.outcome() is None
    assert [bucket.array().tolist() for bucket in buckets] == [[3.0, 3.0], [0.0, 0.0], [0.0, 0.0]]


def test_all_count_from_the_same_number_when_all_have_joined() -> None:
    channel = Channel(CountingCommunicator(), [0], "[rank 0/1]", answer_with_zeros, "world")
    assert [channel.count("step"), channel.count("step"), channel.counted("step")] == [1, 2, 2]
    assert channel.wait(channel.join()).ranks == (0,)
    assert channel.counted("step") == 0
    channel.close()


def test_what_was_made_beside_a_communicator_is_given_back_before_it() -> None:
    order: list[str] = []

    class Closing(CountingCommunicator):
        def close(self) -> None:
            order.append("communicator")
            super().close()

    channel = Channel(Closing(), [0], "[rank 0/1]", answer_with_zeros, "world")
    channel.before_closing(lambda: order.append("node"))
    channel.before_closing(lambda: order.append("network"))
    channel.close()
    assert order == ["node", "network", "communicator"]
