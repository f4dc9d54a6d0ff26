"""Where the members of an engine in memory meet, and what they do wrong is noted at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from meeting_data import COMBINE, Call

from hvdtrain.buffer import Buffer
from hvdtrain.errors import ConnectionLostError

# What memory holds that is given back, as far as it is looked at.
_POISON, _POISONED_BYTES = 0xA5, 4096


class Referee:
    """Notes the faults of one trial, and breaks it off at the first."""

    def __init__(self, lenient: bool = False) -> None:
        self.faults: list[str] = []
        self.lenient = lenient
        self.news = threading.Condition(threading.Lock())
        self.over = False
        self._released: list[npt.NDArray[np.uint8]] = []

    def blame(self, fault: str) -> None:
        """Note a fault, and wake whoever waits (the lock is held)."""
        if not self.over:
            self.faults.append(fault)
        self._end()

    def blame_aloud(self, fault: str) -> None:
        """Note a fault that somebody else has found."""
        with self.news:
            self.blame(fault)

    def release(self, memory: npt.NDArray[np.uint8]) -> None:
        """Take memory back, which nobody may use from now on."""
        memory[:_POISONED_BYTES] = _POISON
        self._released.append(memory)

    def refuse_released(self, who: str, buffer: Buffer) -> None:
        """Blame a member for a buffer in memory that was given back (the lock is held)."""
        for memory in self._released:
            if 0 <= buffer.pointer - memory.ctypes.data < memory.size:
                self.blame(f"{who}: a buffer in memory of a communicator that is closed")

    def check_released(self) -> None:
        """Note whether memory was written to after it was given back."""
        with self.news:
            if any(np.any(memory[:_POISONED_BYTES] != _POISON) for memory in self._released):
                self.blame("memory was written to after its communicator was closed")

    def _end(self) -> None:
        self.over = True
        self.news.notify_all()


class Meeting:
    """The calls of all members that belong together, in the order of their ranks."""

    def __init__(self, size: int) -> None:
        self.calls: list[Call | None] = [None] * size
        self.missing = size
        self.done = False
        self.child: Group | None = None


class Group:
    """An ordered set of members, whose n-th calls must be the same."""

    def __init__(self, referee: Referee, size: int, name: str) -> None:
        self.referee, self.size, self.name = referee, size, name
        self._entered = [0] * size
        self._meetings: dict[int, Meeting] = {}
        self._closed: set[int] = set()
        self._gone: set[int] = set()
        self._users: dict[int, tuple[int, str]] = {}

    @contextmanager
    def using(self, rank: int, what: str) -> Iterator[None]:
        """Blame a member whose threads are here at once, or that has closed its communicator."""
        thread = threading.get_ident()
        with self.referee.news:
            user, doing = self._users.get(rank, (thread, ""))
            if user != thread:
                self.referee.blame(f"{self._who(rank)}: {what} beside {doing} in another thread")
            elif rank in self._closed:
                self.referee.blame(f"{self._who(rank)}: {what} after close()")
            outermost = rank not in self._users
            self._users.setdefault(rank, (thread, what))
        try:
            yield
        finally:
            if outermost:
                with self.referee.news:
                    self._users.pop(rank, None)

    def enter(self, rank: int, call: Call) -> Meeting:
        """Make a member's next call, which others wait for; the last one does the work."""
        with self.referee.news:
            self._refuse(rank, None)
            number = self._entered[rank]
            self._entered[rank] += 1
            meeting = self._meetings.setdefault(number, Meeting(self.size))
            self._compare(meeting, rank, call)
            meeting.calls[rank] = call
            meeting.missing -= 1
            if not meeting.missing:
                del self._meetings[number]
                self._do(meeting)
            return meeting

    def leave(self, rank: int, meeting: Meeting) -> None:
        """Block until all members have made the call."""
        with self.referee.news:
            while not meeting.done:
                self._refuse(rank, meeting)
                self.referee.news.wait()

    def close(self, rank: int) -> None:
        """Have a member take part no more, and blame it if it calls again."""
        self.cut_off(rank)
        with self.referee.news:
            self._closed.add(rank)

    def cut_off(self, rank: int) -> None:
        """Have nothing come of a member's calls, and of those that others make with it."""
        with self.referee.news:
            self._gone.add(rank)
            self.referee.news.notify_all()

    def _refuse(self, rank: int, meeting: Meeting | None) -> None:
        """Raise if nothing can come of a call."""
        if self.referee.over:
            raise ConnectionLostError("the trial is over")
        if rank in self._gone:
            raise ConnectionLostError(f"{self._who(rank)} is cut off")
        missing = [r for r in sorted(self._gone) if meeting is not None and not meeting.calls[r]]
        if meeting is not None and missing:
            if not self.referee.lenient:
                own = meeting.calls[rank]
                self.referee.blame(f"{self._who(rank)}: {own}, when {missing} had closed")
            raise ConnectionLostError(f"{self._who(rank)}: {missing} have gone")

    def _compare(self, meeting: Meeting, rank: int, call: Call) -> None:
        for other, theirs in enumerate(meeting.calls):
            if theirs is None:
                continue
            if (theirs.primitive, theirs.equal) != (call.primitive, call.equal):
                self.referee.blame(f"{self._who(rank)}: {call} where rank {other} is in {theirs}")
                raise ConnectionLostError("the trial is over")
            return

    def _do(self, meeting: Meeting) -> None:
        calls: Sequence[Call] = [call for call in meeting.calls if call is not None]
        try:
            COMBINE[calls[0].primitive](calls)
        except ValueError as error:
            self.referee.blame(f"{self.name}: {calls[0]}: {error}")
            raise ConnectionLostError("the trial is over") from error
        if calls[0].primitive == "split" and calls[0].equal[0]:
            ranks = calls[0].equal[0]
            assert isinstance(ranks, tuple)
            meeting.child = Group(self.referee, len(ranks), f"{self.name}/{list(ranks)}")
        meeting.done = True
        self.referee.news.notify_all()

    def _who(self, rank: int) -> str:
        return f"{self.name} rank {rank}"
