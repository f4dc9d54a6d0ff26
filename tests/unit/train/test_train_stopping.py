"""Which signals ask a run to stop, and which samples are left after it did."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

from hvdtrain.topology import Topology
from hvdtrain.train.loop.heartbeat import StopSignals, stop_signals
from hvdtrain.train.loop.step_plan import StepPlan
from hvdtrain.train.options import TrainOptions

OF_OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
OF_HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2"}


def test_sigterm_counts_where_there_is_time() -> None:
    """Open MPI's mpirun kills a second later, and less."""
    assert stop_signals(OF_OPEN_MPI) == (signal.SIGUSR1,)
    assert stop_signals(OF_HYDRA) == stop_signals({}) == (signal.SIGUSR1, signal.SIGTERM)


def test_the_first_signal_is_noted_and_a_second_sigterm_is_not_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in OF_OPEN_MPI:
        monkeypatch.delenv(name, raising=False)
    received: list[int] = []

    def receive(number: int, frame: Any) -> None:
        received.append(number)

    before = {number: signal.signal(number, receive) for number in stop_signals({})}
    try:
        with StopSignals() as signals:
            assert not signals.asked
            os.kill(os.getpid(), signal.SIGTERM)
            assert (signals.asked, received) == (True, [])
            os.kill(os.getpid(), signal.SIGTERM)
            assert received == [signal.SIGTERM]
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert received == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert received == [signal.SIGTERM, signal.SIGUSR1]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_request_to_leave_is_noted_where_ranks_can() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: received.append(number))
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert (signals.leaves, len(received)) == (False, 1)
            for _ in range(2):  # as often as ranks are lost
                signals.accept_leave()
            os.kill(os.getpid(), signal.SIGUSR2)
            assert (signals.leaves, signals.asked, len(received)) == (True, False, 1)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert len(received) == 2
    finally:
        signal.signal(signal.SIGUSR2, before)


def step_plan(ranks: int) -> StepPlan:
    topology = Topology.from_nodes(0, [0] * ranks, ["a"] * ranks)
    return StepPlan(TrainOptions(batch_size=7), topology, 100)


def test_what_is_left_of_an_epoch_has_every_other_sample_once() -> None:
    """Also on another number of ranks, whose batches are cut elsewhere."""
    whole = list(step_plan(2).batches(epoch=3))
    rest = list(step_plan(2).batches(epoch=3, done=3 * 14))
    assert [step for step, _ in rest] == [step for step, _ in whole[3:]]
    assert all(np.array_equal(a[1], b[1]) for a, b in zip(rest, whole[3:], strict=True))
    elsewhere = list(step_plan(3).batches(epoch=3, done=3 * 14))
    used = np.concatenate([batch for _, batch in (*whole[:3], *elsewhere)])
    assert sorted(used.tolist()) == list(range(100))
    assert [step for step, _ in elsewhere] == [3 * 5 + 2, 3 * 5 + 3, 3 * 5 + 4]
