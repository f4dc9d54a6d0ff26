"""When snapshots in memory are due, and which ranks hold them."""

import os
import signal
from typing import Any

import pytest
from refusing import refused

from hvdtrain.topology import Topology
from hvdtrain.train.loop.heartbeat import StopSignals, stop_signals
from hvdtrain.train.loop.snapshots import SNAPSHOT, Snapshots, second_holder
from hvdtrain.train.option import Interval
from hvdtrain.train.options import TrainOptions


def test_one_waits_until_it_is_taken() -> None:
    snapshots = Snapshots.of(TrainOptions(elastic_snapshot="3 steps"))
    due = [snapshots.due(step, None, set(), 2) for step in range(1, 6)]
    assert due == [False, False, True, True, True]
    assert snapshots.timers == {}


def test_epochs_are_counted_when_they_end() -> None:
    snapshots = Snapshots.of(TrainOptions(elastic_snapshot="2 epochs"))
    assert not snapshots.due(18, None, set(), 2)
    assert not snapshots.due(9, 1, set(), 2)
    assert snapshots.due(18, 2, set(), 2)


@pytest.mark.parametrize(
    ("every", "text"),
    [(None, "taken as often as takes 1% of the time"), ("2 minutes", "taken every 120 seconds")],
)
def test_the_first_is_due_at_once_by_the_clock(every: str | None, text: str) -> None:
    snapshots = Snapshots.of(TrainOptions(elastic_snapshot=every))
    assert snapshots.timers == {SNAPSHOT: 0.0}
    assert not snapshots.due(1, None, set(), 2)
    assert snapshots.due(1, None, {SNAPSHOT}, 2)
    assert snapshots.text.endswith(text)


def test_they_take_a_hundredth_of_the_time() -> None:
    snapshots = Snapshots.of(TrainOptions())
    assert snapshots.seconds_to_next(0.5) == pytest.approx(50)
    assert snapshots.seconds_to_next(0.001) == 5
    assert Snapshots.of(TrainOptions(elastic_snapshot="1 hour")).seconds_to_next(90) == 3600


@pytest.mark.parametrize(
    ("hosts", "leaving", "holder"),
    [
        *(("aabb", (), 2), ("aabb", (2,), 3), ("aabb", (2, 3), 1), ("aaa", (), 1)),
        *(("aaa", (1, 2), 0), ("a", (), 0)),
    ],
)
def test_the_second_holder_is_on_another_host(
    hosts: str, leaving: tuple[int, ...], holder: int
) -> None:
    topology = Topology.from_nodes(0, [0] * len(hosts), list(hosts))
    assert second_holder(topology, leaving) == holder


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        *(("1 step", 1, "steps"), (" 3  Epochs ", 3, "epochs"), ("10 minutes", 600, "seconds")),
        *(("1.5 hours", 5400, "seconds"), ("0.5seconds", 0.5, "seconds")),
    ],
)
def test_parses_what_people_write(text: str, amount: float, unit: str) -> None:
    every = Interval.parse(text)
    assert (every.amount, every.unit) == (amount, unit)


@pytest.mark.parametrize(
    "text",
    [
        *("", "5", "steps", "0 steps", "-1 epoch", "1.5 steps", "0.5 epochs", "5 stepss"),
        *("nan hours", "3 weeks", "5 steps now", "1e3 steps", f"{'9' * 400} hours", "s", "5 s"),
    ],
)
def test_refuses_what_names_none(text: str) -> None:
    with refused("'10 minutes'", repr(text), start="--checkpoint-every must be"):
        Interval.parse(text, "--checkpoint-every")


OF_OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
OF_HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2"}


def test_sigterm_counts_where_there_is_time() -> None:
    """Open MPI's mpirun kills a second later, and less."""
    assert signal.SIGTERM not in stop_signals(OF_OPEN_MPI)
    assert signal.SIGTERM in stop_signals(OF_HYDRA)
    assert stop_signals(OF_HYDRA) == stop_signals({})


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
