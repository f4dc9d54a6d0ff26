"""The order of asynchronous work on a device, and its trivial implementation for the host."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

_Result = TypeVar("_Result")
_Memory = TypeVar("_Memory", bound="Movable")


class Event(Protocol):
    """A point in the work enqueued on a device."""

    def query(self) -> bool:
        """Return whether the device has passed it."""

    def synchronize(self) -> None:
        """Block until the device has passed it."""


class Movable(Protocol):
    """The part of a tensor that is used to copy it."""

    def copy_(self: _Memory, src: _Memory, non_blocking: bool = False) -> object:
        """Overwrite the elements with those of another tensor."""

    def zero_(self) -> object:
        """Set all elements to zero."""


# Events that must pass before other work starts; None if there is nothing to wait for.
Mark: TypeAlias = tuple[Event, ...] | None

# An identifier of a stream of a device.
Place: TypeAlias = Hashable


class Streams:
    """The order between a program's work on a device and a channel's operations.

    The program's threads enqueue work on their current streams, a channel's operations run on a
    side stream, and each waits for the other by marks. This class is for the host, where work is
    complete when a call returns. All methods are local and thread-safe.
    """

    def refuse_capture(self, what: str) -> None:
        """Refuse to become part of a graph that the current stream is capturing."""

    def place(self) -> Place:
        """Return the calling thread's current stream."""
        return None

    def mark(self, places: Iterable[Place] | None = None) -> Mark:
        """Return a mark after all work enqueued on some streams so far.

        Gradients of one bucket may be computed on several streams: the caller that fills it
        collects their `place()` and marks them all once the bucket is full.
        """
        return None

    def fill(self, source: _Memory, target: _Memory) -> None:
        """Copy a tensor into an operation's memory, after all earlier reads from it.

        Marks returned later come after the copy. The source may be freed when this returns.
        """
        target.copy_(source)

    def clear(self, target: Movable) -> None:
        """Set an operation's memory to zero, after all earlier reads from it."""
        target.zero_()

    def read(self, source: _Memory, target: _Memory) -> None:
        """Copy an operation's memory to a tensor, after `wait` was called."""
        target.copy_(source)

    def run_after(self, mark: Mark, work: Callable[[], _Result]) -> tuple[_Result, Mark]:
        """Call `work()` with the side stream current, after a mark."""
        return work(), None

    def wait(self, mark: Mark) -> None:
        """Make the calling thread's current stream wait for a mark; the host does not wait."""

    def done(self, mark: Mark) -> bool:
        """Return whether the device has passed a mark."""
        return True

    def settle(self, mark: Mark) -> None:
        """Block until the device has passed a mark."""

    def keep(self, memory: object) -> None:
        """Record that the side stream uses a tensor.

        Its memory is then not reused before that stream has finished its work, even if the last
        reference is dropped earlier. Once in a tensor's lifetime is enough.
        """

    def hand_over(self, memory: object) -> None:
        """Record that the current stream uses a tensor allocated on the side stream."""


class Several(Streams):
    """The order of work for operations on several devices."""

    def __init__(self, streams: Sequence[Streams]) -> None:
        self._streams = streams

    def mark(self, places: Iterable[Place] | None = None) -> Mark:
        """Return a mark after the calling thread's current stream on each device."""
        return _joined(streams.mark() for streams in self._streams)

    def run_after(self, mark: Mark, work: Callable[[], _Result]) -> tuple[_Result, Mark]:
        first, *others = self._streams
        if not others:
            return first.run_after(mark, work)
        rest = partial(Several(others).run_after, mark, work)
        (result, inner), outer = first.run_after(mark, rest)
        return result, _joined([inner, outer])

    def wait(self, mark: Mark) -> None:
        for streams in self._streams:
            streams.wait(mark)

    def done(self, mark: Mark) -> bool:
        return self._streams[0].done(mark)

    def settle(self, mark: Mark) -> None:
        self._streams[0].settle(mark)


def _joined(marks: Iterable[Mark]) -> Mark:
    return tuple(event for mark in marks for event in mark or ())


HOST = Streams()
