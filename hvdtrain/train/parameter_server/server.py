"""The loop of a server: it answers pulls, and steps its shard on the gradients pushed to it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol as Interface

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.engines.point_to_point import Pending, PointToPoint
from hvdtrain.polling import poll_until
from hvdtrain.train.parameter_server.protocol import Answer, Protocol, Update
from hvdtrain.train.parameter_server.statistics import Pushes
from hvdtrain.train.parameter_server.wire import (
    ANSWER,
    GRADIENT,
    PULL,
    REQUEST,
    WEIGHTS,
    Flat,
    empty_answer,
    empty_request,
)


class Shard(Interface):
    """A shard of the weights with its optimizer."""

    @property
    def weights(self) -> Flat:
        """The current weights; steps change them in place."""

    def step(self, gradient: Flat, number: int) -> None:
        """Step the optimizer."""


class Server:
    """A server between two pauses of the run."""

    def __init__(
        self,
        messages: PointToPoint,
        shard: Shard,
        protocol: Protocol,
        blocked: Callable[[], AbstractContextManager[None]],
        first: int,
    ) -> None:
        self._messages, self._shard, self._protocol = messages, shard, protocol
        self._blocked, self._first = blocked, first
        self._gradients: dict[int, Flat] = {}
        self._outgoing: dict[int, Flat] = {}
        self._sends: dict[int, list[Pending]] = {}

    @collective
    def serve(self, rounds: int, go_on: Callable[[], bool]) -> Pushes:
        """Serve until all workers are done (collective, with the workers' rounds)."""
        done, goes_on = 0, True
        while done < rounds and goes_on:
            self._take_request()
            for answer in self._protocol.answers():
                self._answer(answer)
            while done < self._protocol.rounds_done and goes_on:
                done, goes_on = done + 1, go_on()
        for worker in list(self._sends):
            self._finish_sends(worker)
        return self._protocol.pushes

    def _take_request(self) -> None:
        """Wait for a request of any worker, and take it."""
        with self._blocked():
            worker = self._next_worker()
            request = empty_request()
            self._receive(request, worker, REQUEST)
        kind, samples, version = request.tolist()
        if kind == PULL:
            self._protocol.pull(worker, samples)
            return
        if samples:
            self._receive_gradient(worker)
        update = self._protocol.push(worker, samples, version)
        if update is not None:
            self._shard.step(self._combine(update), self._first + update.round)

    def _next_worker(self) -> int:
        found: list[int] = []

        def find() -> bool:
            worker = self._messages.waiting(REQUEST)
            if worker is not None:
                found.append(worker)
            return bool(found)

        poll_until(find)
        return found[0]

    def _receive(self, array: Flat, worker: int, tag: int) -> None:
        self._messages.start_receive(Buffer.of(array), worker, tag).wait()

    def _receive_gradient(self, worker: int) -> None:
        if worker not in self._gradients:
            self._gradients[worker] = np.empty_like(self._shard.weights)
        with self._blocked():
            self._receive(self._gradients[worker], worker, GRADIENT)

    def _combine(self, update: Update) -> Flat:
        """Return the weighted sum of gradients, added in the order of the workers."""
        (first, weight), *rest = update.weights.items()
        total = self._gradients[first]
        if weight != 1.0:
            total *= weight
        for worker, weight in rest:
            gradient = self._gradients[worker]
            gradient *= weight
            total += gradient
        return total

    def _answer(self, answer: Answer) -> None:
        worker = answer.worker
        self._finish_sends(worker)  # it has them: it would not have asked otherwise
        header = empty_answer()
        header[:] = answer.late, self._protocol.version
        self._sends[worker] = [self._messages.start_send(Buffer.of(header), worker, ANSWER)]
        if answer.late:
            return
        if worker not in self._outgoing:
            self._outgoing[worker] = np.empty_like(self._shard.weights)
        copy = self._outgoing[worker]  # the weights change while it is sent
        copy[:] = self._shard.weights
        self._sends[worker].append(self._messages.start_send(Buffer.of(copy), worker, WEIGHTS))

    def _finish_sends(self, worker: int) -> None:
        for send in self._sends.pop(worker, ()):
            send.wait()
