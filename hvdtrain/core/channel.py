"""A communicator together with the agreement of its members on what comes next.

Ranks nearly always do agree. In a round every rank's next request goes out as one small hash
in a non-blocking MIN/MAX all-reduce, which is tested with back-off; only when the hashes
differ are the full requests exchanged and reported.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.engines.communicator import Communicator, Pending
from hvdtrain.errors import MismatchError, PeerFailureError

__all__ = ["LEAVE", "Channel", "Request", "Round", "wait_patiently"]

_SPIN_SECONDS = 100e-6
_LONGEST_SLEEP_SECONDS = 1e-3


@dataclass(frozen=True)
class Request:
    """What a rank wants to do next; equal on all ranks where they must do the same.

    `details` are named properties that must be equal too (type, shape, root rank, ...).
    """

    operation: str
    name: str = ""
    details: tuple[tuple[str, str], ...] = ()

    @property
    def subject(self) -> str:
        """The operation and its name."""
        return f"{self.operation} {self.name!r}" if self.name else self.operation

    def __str__(self) -> str:
        details = ", ".join(f"{key} {value}" for key, value in self.details)
        return f"{self.subject} ({details})" if details else self.subject

    def encode(self) -> bytes:
        """Return the same bytes exactly for equal requests."""
        fields = [self.operation, self.name, *(text for pair in self.details for text in pair)]
        return "\0".join(fields).encode()


LEAVE = Request("leave the job")


class Channel:
    """A communicator whose members agree on each operation before they enter it.

    Attributes:
        communicator: what it wraps; nobody else may use it.
        unfinished: what this rank still owes the others after an agreed operation of several
            parts has begun, or "".
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.unfinished = ""
        self._lock = threading.RLock()

    @contextmanager
    def agreed(self, request: Request) -> Iterator[Communicator]:
        """Wait until every member has submitted an equal request; then use the communicator.

        Collective; see `wait_patiently` for what waiting costs.

        Raises:
            PeerFailureError: a member has left the job instead.
            MismatchError: members submitted different requests.
        """
        with self._lock:
            proposal = Round(self, request)
            proposal.wait()
            proposal.settle()
            yield self.communicator


class Round:
    """One round of agreement that has been started on a channel."""

    def __init__(self, channel: Channel, request: Request) -> None:
        self._communicator = channel.communicator
        self._request = request
        digest = np.frombuffer(blake2b(request.encode(), digest_size=16).digest(), np.uint64)
        self._values: npt.NDArray[np.uint64] = np.concatenate([digest, ~digest])
        self._pending: Pending = self._communicator.start_max(self._values)

    def test(self) -> bool:
        """Tell, without blocking, whether every member has submitted its request."""
        return self._pending.test()

    def wait(self) -> None:
        """Block until every member has submitted its request."""
        wait_patiently(self._pending.test)

    def settle(self) -> None:
        """Compare the requests once all are there; raise on every member if they differ."""
        highest, lowest = self._values[:2], ~self._values[2:]
        if np.array_equal(highest, lowest):
            return
        requests = self._exchange()
        me = self._communicator.rank
        title = f"[rank {me}/{self._communicator.size}] {self._request.subject}: "
        left = [rank for rank, request in enumerate(requests) if request == str(LEAVE)]
        if left:
            waiting = sorted(set(requests) - {str(LEAVE)})
            raise PeerFailureError(
                f"{title}{_ranks(left)} left the job while others were in {', '.join(waiting)}. "
                "Let every rank run the same number of steps and end together"
            )
        sent = "; ".join(
            f"{_ranks([r for r, other in enumerate(requests) if other == request])} sent {request}"
            for request in dict.fromkeys(requests)
        )
        raise MismatchError(f"{title}{sent}. Submit the same operation on every rank")

    def _exchange(self) -> list[str]:
        own = np.frombuffer(str(self._request).encode(), np.uint8).copy()
        sizes = np.empty(self._communicator.size, np.int64)
        counts = [1] * len(sizes)
        size = np.array([own.size])
        self._communicator.allgather(Buffer.from_array(size), Buffer.from_array(sizes), counts)
        texts = np.empty(sizes.sum(), np.uint8)
        self._communicator.allgather(
            Buffer.from_array(own), Buffer.from_array(texts), sizes.tolist()
        )
        parts = np.split(texts, np.cumsum(sizes)[:-1])
        return [part.tobytes().decode() for part in parts]


def wait_patiently(test: Callable[[], bool], limit_seconds: float = math.inf) -> bool:
    """Call `test` until it is true or the limit is over, and return whether it was true.

    It spins for 100 us, because peers are nearly always there by then, and after that sleeps
    up to 1 ms between calls: waiting inside MPI would burn a core.
    """
    started = time.perf_counter()
    sleep_seconds = _SPIN_SECONDS
    while not test():
        waited = time.perf_counter() - started
        if waited > limit_seconds:
            return False
        if waited > _SPIN_SECONDS:
            time.sleep(sleep_seconds)
            sleep_seconds = min(2 * sleep_seconds, _LONGEST_SLEEP_SECONDS)
    return True


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
