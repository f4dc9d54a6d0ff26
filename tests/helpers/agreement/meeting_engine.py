"""What the primitives of an engine compute, from the arguments of all members at once."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.engines.communicator import Communicator, Pending, VotedReduction, VoteSteps
from hvdtrain.engines.local import LocalCommunicator
from hvdtrain.errors import ConnectionLostError
from hvdtrain.types import DType, ReduceOp

_REDUCE: Mapping[ReduceOp, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


@dataclass(frozen=True, slots=True)
class Call:
    primitive: str
    equal: tuple[object, ...] = ()
    own: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.primitive}({', '.join(map(str, self.equal))})"


@dataclass(slots=True)
class Carried:
    """The elements of an allreduce beside a vote, and whether they were reduced."""

    source: Buffer
    target: Buffer
    equal: tuple[ReduceOp, float]
    prescale: float
    done: bool = False


def combine(calls: Sequence[Call]) -> None:
    """Do what a primitive does, from the arguments of all members at once."""
    first = calls[0]
    match first.primitive:
        case "start_max":
            _max(calls)
        case "allreduce":
            _allreduce(calls)
        case "broadcast":
            root: Any = first.equal[0]
            content = calls[root].own[0].array().copy()
            for call in calls:
                call.own[0].array()[:] = content
        case "allgather":
            content = np.concatenate([call.own[0].array() for call in calls])
            for call in calls:
                call.own[1].array()[:] = content


def _max(calls: Sequence[Call]) -> None:
    values = [call.own[0] for call in calls]
    alike = all(np.array_equal(own[-2:], values[0][-2:]) for own in values)
    highest = np.maximum.reduce(values)
    for own in values:
        own[:] = highest
    if alike and all(len(call.own) == 2 for call in calls):
        for carried in zip(*(call.own[1] for call in calls), strict=True):
            for one in carried:
                one.target.copy_from(one.source)
                one.done = True
            _allreduce([Call("allreduce", c.equal, (c.target, c.prescale)) for c in carried])


def _allreduce(calls: Sequence[Call]) -> None:
    op, postscale = calls[0].equal[:2]
    assert isinstance(op, ReduceOp)
    scaled = []
    for call in calls:
        buffer, prescale = call.own[0], call.own[1]
        copy = Buffer.from_array(buffer.array().copy(), buffer.dtype)
        copy.scale(prescale)
        scaled.append(copy.array())
    result = _REDUCE[op].reduce(scaled)
    for call in calls:
        call.own[0].array()[:] = result
        call.own[0].scale(postscale)


# What memory holds that is given back, as far as it is looked at.
_POISON, _POISONED_BYTES = 0xA5, 4096


class Referee:
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
            if theirs and (theirs.primitive, theirs.equal) != (call.primitive, call.equal):
                self.referee.blame(f"{self._who(rank)}: {call} where rank {other} is in {theirs}")
                raise ConnectionLostError("the trial is over")

    def _do(self, meeting: Meeting) -> None:
        calls: Sequence[Call] = [call for call in meeting.calls if call is not None]
        try:
            combine(calls)
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


# The name of a rank's main thread, which alone handles signals.
PROGRAM = "program"


class EngineFaultError(RuntimeError):
    """What the engine raises on the rank on which a test has it fail."""


@dataclass
class EngineFault:
    call: int
    arrives: bool = False
    dies: bool = False
    interrupted: bool = False


class _Started(Pending):
    def __init__(self, complete: Callable[[], None], meeting: Meeting) -> None:
        self._complete, self._meeting = complete, meeting

    def test(self) -> bool:
        if self._meeting.done:
            self._complete()
        return self._meeting.done

    def wait(self) -> None:
        self._complete()


class MeetingCommunicator(Communicator):
    def __init__(
        self, group: Group, rank: int, concurrent: bool, fault: EngineFault | None = None
    ) -> None:
        self.rank, self.size = rank, group.size
        self.capabilities = replace(LocalCommunicator.capabilities, concurrent=concurrent)
        self.group, self._fault, self._calls = group, fault, 0
        self._memory: list[npt.NDArray[np.uint8]] = []
        self._closed = False

    def start_max(self, values: npt.NDArray[np.uint64]) -> Pending:
        with self.group.using(self.rank, "start_max"):
            fails = self._count()
            meeting = self.group.enter(self.rank, Call("start_max", (values.size,), (values,)))
        return _Started(lambda: self._wait(meeting, fails), meeting)

    def _wait(self, meeting: Meeting, fails: bool) -> None:
        with self.group.using(self.rank, "the wait for start_max"):
            self.group.leave(self.rank, meeting)
            self._raise_if(fails)

    def allreduce(
        self, buffer: Buffer, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        equal = (op, postscale, buffer.dtype.value, buffer.count, self._offset(buffer))
        self._call(Call("allreduce", equal, (buffer, prescale)), [buffer])

    def voted_reduction(
        self, dtype: DType, op: ReduceOp, prescale: float, postscale: float
    ) -> VotedReduction:
        return _MeetingVote(self, dtype, (op, postscale), prescale)

    def vote(self, votes: bytes, carried: list[Carried]) -> bytes:
        """Vote as the kernel does: members that only vote see the same numbers."""
        values = np.frombuffer(bytearray(votes), np.uint64)
        buffers = [buffer for one in carried for buffer in (one.source, one.target)]
        self._call(Call("start_max", (values.size,), (values, carried)), buffers)
        return b"" if all(one.done for one in carried) else values.tobytes()

    def broadcast(self, buffer: Buffer, root_rank: int) -> None:
        equal = (root_rank, buffer.dtype.value, buffer.count)
        self._call(Call("broadcast", equal, (buffer,)), [buffer])

    def allgather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        equal = (tuple(counts), send.dtype.value)
        assert (send.count, receive.count) == (counts[self.rank], sum(counts))
        self._call(Call("allgather", equal, (send, receive)), [send, receive])

    def alltoall(self, *_: object) -> None:
        raise NotImplementedError

    def barrier(self) -> None:
        self._call(Call("barrier"))

    def split(self, ranks: Sequence[int]) -> "MeetingCommunicator | None":
        meeting = self._call(Call("split", (tuple(ranks),)))
        if meeting.child is None or self.rank not in ranks:
            return None
        rank = list(ranks).index(self.rank)
        return MeetingCommunicator(meeting.child, rank, self.capabilities.concurrent)

    def empty(self, nbytes: int, device: str = "cpu") -> npt.NDArray[np.uint8]:
        self._call(Call("empty", (nbytes,)))
        memory = np.empty(nbytes, np.uint8)
        self._memory.append(memory)
        return memory

    def close(self) -> None:
        if not self._closed:
            with self.group.using(self.rank, "close()"):
                self._closed = True
            for memory in self._memory:
                self.group.referee.release(memory)
            self.group.close(self.rank)

    def abort(self, code: int) -> None:
        raise NotImplementedError

    def _call(self, call: Call, buffers: Iterable[Buffer] = ()) -> Meeting:
        with self.group.using(self.rank, str(call)):
            self._check_memory(buffers)
            fails = self._count()
            meeting = self.group.enter(self.rank, call)
            self.group.leave(self.rank, meeting)
            self._raise_if(fails)
        return meeting

    def _check_memory(self, buffers: Iterable[Buffer]) -> None:
        referee = self.group.referee
        with referee.news:
            for buffer in buffers:
                referee.refuse_released(f"rank {self.rank}", buffer)

    def _offset(self, buffer: Buffer) -> tuple[int, int] | None:
        """Return where a buffer lies in the memory that was handed out: equal on all members."""
        for number, memory in enumerate(self._memory):
            offset = buffer.pointer - memory.ctypes.data
            if 0 <= offset < memory.size:
                return number, offset
        return None

    def _count(self) -> bool:
        """Return whether this call fails once all members have made it."""
        number, fault = self._calls, self._fault
        self._calls += 1
        if fault is None or number != fault.call:
            return False
        if fault.dies:
            self.group.cut_off(self.rank)
            raise ConnectionLostError(f"rank {self.rank} is dead")
        self._raise_if(not fault.arrives)
        return True

    def _raise_if(self, fails: bool) -> None:
        if not fails or self._fault is None:
            return
        if self._fault.interrupted and threading.current_thread().name == PROGRAM:
            raise KeyboardInterrupt
        raise EngineFaultError(f"rank {self.rank}: an engine call failed")


class _MeetingVote:
    _begun: tuple[bytes, int]
    finish: Callable[[int], bytes]

    def __init__(
        self,
        communicator: MeetingCommunicator,
        dtype: DType,
        equal: tuple[ReduceOp, float],
        prescale: float,
    ) -> None:
        self._communicator, self._dtype = communicator, dtype
        self._equal, self._prescale = equal, prescale

    def __call__(self, votes: bytes, pieces: Sequence[int]) -> bytes:
        dtype, rest = self._dtype, (self._equal, self._prescale)
        rows = zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True)
        carried = [Carried(Buffer(s, dtype, n), Buffer(t, dtype, n), *rest) for s, t, n in rows]
        return self._communicator.vote(votes, carried)

    def steps(self, count: int) -> VoteSteps:
        def cast(ballot: bytes, number: int, source: int) -> None:
            assert number == 0
            self._begun = ballot * 3, source

        def look(target: int) -> int:  # the others are never there at once
            votes, source = self._begun
            self.finish = lambda verdict: self(votes, [source, target, count])
            return 0

        return cast, look
