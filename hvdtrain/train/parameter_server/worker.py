"""A worker's side: it pulls weights from all servers, and pushes gradients to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from hvdtrain.buffer import Buffer
from hvdtrain.engines.point_to_point import Pending, PointToPoint
from hvdtrain.train.parameter_server.wire import (
    ANSWER,
    GRADIENT,
    PULL,
    PUSH,
    REQUEST,
    WEIGHTS,
    Flat,
    empty_answer,
    empty_request,
)


class Worker:
    """A worker's connections to the servers."""

    def __init__(
        self,
        messages: PointToPoint,
        bounds: Mapping[int, tuple[int, int]],
        blocked: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._messages, self._bounds, self._blocked = messages, dict(bounds), blocked
        self._versions = dict.fromkeys(bounds, 0)

    def pull(self, weights: Flat, samples: int) -> bool:
        """Overwrite the weights with those of the servers, once the servers allow it."""
        answers = {server: empty_answer() for server in self._bounds}
        with self._blocked():
            pending = [
                self._messages.start_receive(Buffer.of(answer), server, ANSWER)
                for server, answer in answers.items()
            ]
            _wait_for(pending + self._request(PULL, samples))
            if any(late for late, _ in answers.values()):
                return False
            _wait_for(
                [
                    self._messages.start_receive(Buffer.of(weights[begin:end]), server, WEIGHTS)
                    for server, (begin, end) in self._bounds.items()
                ]
            )
        self._versions = {server: int(version) for server, (_, version) in answers.items()}
        return True

    def push(self, gradient: Flat, samples: int) -> None:
        """Send the gradient to the servers, each its part."""
        with self._blocked():
            pending = self._request(PUSH, samples)
            if samples:
                pending += [
                    self._messages.start_send(Buffer.of(gradient[begin:end]), server, GRADIENT)
                    for server, (begin, end) in self._bounds.items()
                ]
            _wait_for(pending)

    def _request(self, kind: int, samples: int) -> list[Pending]:
        pending = []
        for server, version in self._versions.items():
            request = empty_request()
            request[:] = kind, samples, version
            pending.append(self._messages.start_send(Buffer.of(request), server, REQUEST))
        return pending


def _wait_for(pending: list[Pending]) -> None:
    for operation in pending:
        operation.wait()
