"""Snapshots in memory: the state of all ranks, on two of them, to go back to without others."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.objects import Bytes, allgather_object, send_bytes
from hvdtrain.topology import Topology
from hvdtrain.train.config_file import counted
from hvdtrain.train.loop.protocol import TrainingLoop
from hvdtrain.train.option import Interval
from hvdtrain.train.options import TrainOptions

# What a run does between steps, and the names of the timers that run on rank 0's clock.
LOG, WATCH, EVALUATE, SAVE, SNAPSHOT = "log", "watch", "evaluate", "save", "snapshot"


def intervals_of(options: TrainOptions) -> dict[str, Interval]:
    """Return how often a run logs, compares the ranks, evaluates and saves, without what never."""
    intervals = {
        EVALUATE: Interval.parse(options.evaluate_every, "--evaluate-every"),
        SAVE: Interval.parse(options.checkpoint_every, "--checkpoint-every"),
    }
    if options.framework == "torch":
        intervals |= {LOG: Interval(50, "steps"), WATCH: Interval(100, "steps")}
    else:  # Keras starts another `fit` after each pause
        intervals[WATCH] = Interval(1, "epochs")
    for name, steps in ((LOG, options.log_every), (WATCH, options.watch_every)):
        if steps:
            intervals[name] = Interval(steps, "steps")
        elif steps == 0:
            del intervals[name]
    return intervals


def timers_of(options: TrainOptions) -> dict[str, float]:
    """Return the seconds between actions that go by the clock, by name."""
    found = intervals_of(options).items()
    return {name: every.seconds for name, every in found if every.seconds is not None}


# A snapshot takes at most the hundredth part of the time until the next one. Keras starts another
# `fit` after each, in some 50 ms.
_SHARE, _LEAST_SECONDS = 0.01, 5.0


def needs_snapshots(options: TrainOptions, loop: TrainingLoop) -> bool:
    """Return whether ranks have a state that is lost with them, or may be torn."""
    replicated = options.framework == "torch" and options.parameter_server is None
    return not replicated or options.make_exchange() is not None or loop.shares_optimizer


class Snapshots:
    """Takes snapshots, and holds the newest one on rank 0 and on another rank.

    That is on another host if there is one. If the first is lost, all continue from the second.
    """

    def __init__(self, every: Interval | None) -> None:
        self._every = every
        self._step, self._payload = -1, np.empty(0, np.uint8)
        self._waits = False

    @classmethod
    def of(cls, options: TrainOptions) -> Snapshots:
        text = options.elastic_snapshot
        return cls(None if text is None else Interval.parse(text, "--elastic-snapshot"))

    @property
    def text(self) -> str:
        """What they are for, and how often they are taken, for people."""
        often = f"as often as takes {_SHARE:.0%} of the time"
        if self._every is not None:
            often = f"every {counted(self._every.amount, self._every.unit.removesuffix('s'))}"
        return f"when ranks are lost, back to the last snapshot in memory, taken {often}"

    @property
    def timers(self) -> dict[str, float]:
        """The timer of a heartbeat, if they go by the clock: the first one is due at once."""
        return {SNAPSHOT: 0.0} if self._every is None or self._every.seconds is not None else {}

    def due(self, step: int, epoch: int | None, timers: Collection[str], size: int) -> bool:
        """Return whether one is due, until it is taken (the same on all ranks)."""
        every = self._every
        if every is not None:
            self._waits |= every.ends_with_step(step)
            self._waits |= epoch is not None and every.ends_with_epoch(epoch)
        return size > 1 and (self._waits or SNAPSHOT in timers)

    @collective
    def take(
        self, step: int, content: Callable[[], Mapping[str, Any]], leaving: Collection[int] = ()
    ) -> None:
        topology = context.current().topology
        self._waits = False
        payload = np.empty(0, np.uint8)
        if topology.rank == 0:
            payload = np.frombuffer(bytearray(pickle.dumps(content(), protocol=5)), np.uint8)
            # Kept before it is sent: the other rank holds the one before until it has this one.
            self._step, self._payload = step, payload
        second = second_holder(topology, leaving)
        self._send(payload, 0, second, step)
        if not leaving and topology.rank not in (0, second):  # held one in a larger world
            self._step, self._payload = -1, np.empty(0, np.uint8)

    def seconds_to_next(self, taken: float) -> float:
        """Return the seconds from one snapshot to the next, for those that go by the clock."""
        if self._every is not None and self._every.seconds is not None:
            return self._every.seconds
        return max(_LEAST_SECONDS, taken / _SHARE)

    @collective
    def find(self, reached: int) -> int:
        """Hold the newest snapshot twice again (collective over the ranks left).

        Returns:
            The steps that the rank furthest ahead has done.
        """
        topology = context.current().topology
        rows = allgather_object((self._step, reached), "snapshots")
        steps = [step for step, _ in rows]
        newest, furthest = max(steps), max(done for _, done in rows)
        source, self._waits = steps.index(newest), False
        if newest >= 0:
            payload = self._payload if topology.rank == source else np.empty(0, np.uint8)
            for receiver in (0, second_holder(topology, ())):
                self._send(payload, source, receiver, newest)
        return int(furthest)

    def content(self) -> dict[str, Any]:
        """Return the content of the newest, as that of a checkpoint; {} without (rank 0 only)."""
        content: dict[str, Any] = {} if self._step < 0 else pickle.loads(self._payload.data)
        return content

    @collective
    def _send(self, payload: Bytes, source: int, receiver: int, step: int) -> None:
        """Send a snapshot from one rank to another, which holds it then."""
        received = None if source == receiver else send_bytes(payload, receiver, "snapshot")
        if received is not None:
            self._step, self._payload = step, received


def second_holder(topology: Topology, leaving: Collection[int]) -> int:
    """Return the rank that holds snapshots besides rank 0; 0 if there is no other."""
    others = [rank for rank in range(1, topology.size) if rank not in leaving]
    hosts = topology.hostnames
    elsewhere = [rank for rank in others if hosts[rank] != hosts[0]]
    return (elsewhere or others or [0])[0]
