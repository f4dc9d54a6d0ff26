"""The order of work on a device that does it later than it is told to; here the host's."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

__all__ = ["HOST", "Event", "Mark", "Movable", "Place", "Several", "Streams"]

_Result = TypeVar("_Result")
_Memory = TypeVar("_Memory", bound="Movable")


class Event(Protocol):
    """A point in the work that a device has been given."""

    def query(self) -> bool:
        """Return whether the device has come past it."""

    def synchronize(self) -> None:
        """Block until it has."""


class Movable(Protocol):
    """What of a tensor is used to copy it."""

    def copy_(self: _Memory, src: _Memory, non_blocking: bool = False) -> object:
        """Take the elements of another one."""

    def zero_(self) -> object:
        """Take zeros for elements."""


# What must have been done before something else; None where nothing is left to wait for.
Mark: TypeAlias = tuple[Event, ...] | None

# A stream of a device, as far as one can be told from another.
Place: TypeAlias = Hashable


class Streams:
    """The order between a program's work on a device and that of a channel's operations.

    The program's threads put work on their current streams; a channel's operations run on a
    stream of their own, and either waits for the other by marks. This class is the host's, where
    everything is done when a call returns. All methods are local and may be called by any thread.
    """

    def refuse_capture(self, what: str) -> None:
        """Refuse to be part of a graph that the current stream records.

        Args:
            what: cannot be part of one, for people.

        Raises:
            UnsupportedError: it does.
        """

    def place(self) -> Place:
        """Return the calling thread's current stream."""
        return None

    def mark(self, places: Iterable[Place] | None = None) -> Mark:
        """Return what comes after everything that has been put on some streams so far.

        Gradients of one bucket may come on several streams: whoever fills it keeps the set of
        their `place()` and marks them all, once, when the bucket is full.

        Args:
            places: the streams; by default the calling thread's current one.
        """
        return None

    def fill(self, source: _Memory, target: _Memory) -> None:
        """Copy a tensor into memory of operations, after all that was read from there.

        `mark()` comes after it. The source may be given back as soon as this returns.
        """
        target.copy_(source)

    def clear(self, target: Movable) -> None:
        """Put zeros into memory of operations, after all that was read from there."""
        target.zero_()

    def read(self, source: _Memory, target: _Memory) -> None:
        """Copy a tensor out of memory of operations, for which `wait` was called."""
        target.copy_(source)

    def run_after(self, mark: Mark, work: Callable[[], _Result]) -> tuple[_Result, Mark]:
        """Do `work()` on the stream of operations, after a mark.

        Returns:
            Its result, and the mark that comes after what it put on that stream.
        """
        return work(), None

    def wait(self, mark: Mark) -> None:
        """Have what the calling thread puts on its current stream come after a mark.

        The host does not wait.
        """

    def done(self, mark: Mark) -> bool:
        """Return whether the device has come past a mark."""
        return True

    def settle(self, mark: Mark) -> None:
        """Block until the device has come past a mark."""

    def keep(self, memory: object) -> None:
        """Note that the stream of operations uses a tensor.

        Its memory is then not given to others before that stream is through with it, even if the
        last reference goes earlier. Once is enough for as long as a tensor lives.
        """

    def hand_over(self, memory: object) -> None:
        """Note that the current stream uses a tensor made on the stream of operations."""


class Several(Streams):
    """The order of work of operations on memory of several devices.

    Args:
        streams: of each device.
    """

    def __init__(self, streams: Sequence[Streams]) -> None:
        self._streams = streams

    def mark(self, places: Iterable[Place] | None = None) -> Mark:
        """Return what comes after the calling thread's current stream on each device."""
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
