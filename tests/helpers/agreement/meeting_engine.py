"""An engine whose ranks are threads of one process: every primitive is a meeting in memory.

It is made to find mistakes: members in different primitives, or in one with different arguments,
calls after close(), two threads in one communicator, and memory that is used after close().
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from meeting_data import Call, Carried
from meeting_group import Group, Meeting

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.engines.communicator import Communicator, Pending, Pieces, Verdict, VotedReduction
from hvdtrain.engines.features import Slices
from hvdtrain.engines.local import LocalCommunicator
from hvdtrain.errors import ConnectionLostError
from hvdtrain.types import DType, ReduceOp

# The name of a rank's main thread, which alone handles signals.
PROGRAM = "program"


class EngineFaultError(RuntimeError):
    """What the engine raises on the rank on which a test has it fail."""


@dataclass
class EngineFault:
    """What goes wrong in the engine of one rank."""

    call: int
    arrives: bool = False
    dies: bool = False
    interrupted: bool = False
    happened: bool = False


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
    """One member's communicator."""

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
        self, count: int, dtype: DType, op: ReduceOp, prescale: float, postscale: float
    ) -> VotedReduction:
        return _MeetingVote(self, count, dtype, (op, postscale), prescale)

    def vote(self, ballot: bytes, carried: Carried) -> Verdict:
        """Vote as the kernel does: members that only vote see the same numbers."""
        values = np.frombuffer(bytearray(ballot * 3), np.uint64)
        if self._vote(values, [carried]):
            return Verdict.DONE
        agreed = values.tobytes()[: len(ballot)] == ballot
        return Verdict.AGREED if agreed else Verdict.DIFFERENT

    def vote_on_many(
        self,
        votes: npt.NDArray[np.uint64],
        pieces: Pieces,
        dtype: DType,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> bool:
        rows = zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True)
        carried = [
            Carried(Buffer(s, dtype, n), Buffer(t, dtype, n), (op, postscale), prescale)
            for s, t, n in rows
        ]
        return self._vote(votes, carried)

    def _vote(self, values: npt.NDArray[np.uint64], carried: list[Carried]) -> bool:
        buffers = [buffer for one in carried for buffer in (one.source, one.target)]
        self._call(Call("start_max", (values.size,), (values, carried)), buffers)
        return all(one.done for one in carried)

    def broadcast(self, buffer: Buffer, root_rank: int) -> None:
        equal = (root_rank, buffer.dtype.value, buffer.count)
        self._call(Call("broadcast", equal, (buffer,)), [buffer])

    def allgather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        equal = (tuple(counts), send.dtype.value)
        assert (send.count, receive.count) == (counts[self.rank], sum(counts))
        self._call(Call("allgather", equal, (send, receive)), [send, receive])

    def alltoall(
        self,
        send: Buffer,
        receive: Buffer,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        own = (send, receive, tuple(send_counts), tuple(receive_counts))
        assert (send.count, receive.count) == (sum(send_counts), sum(receive_counts))
        self._call(Call("alltoall", (send.dtype.value,), own), [send, receive])

    def reduce_scatter(
        self,
        send: Buffer,
        receive: Buffer,
        counts: Sequence[int],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        equal = (op, postscale, tuple(counts), send.dtype.value)
        assert (send.count, receive.count) == (sum(counts), counts[self.rank])
        self._call(Call("reduce_scatter", equal, (send, prescale, receive)), [send, receive])

    def barrier(self) -> None:
        self._call(Call("barrier"))

    def split(self, ranks: Sequence[int]) -> MeetingCommunicator | None:
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

    def slices(self) -> MeetingSlices:
        return MeetingSlices(self)

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
        fault.happened = True
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


class MeetingSlices(Slices):
    """Slices in memory that all members have, as threads of one process."""

    nodes = 1
    adds_placed = False

    def __init__(self, communicator: MeetingCommunicator) -> None:
        self._communicator = communicator
        self.owners, self.number = communicator.size, communicator.rank

    def copies(self, memory: Elements) -> None:
        """Return None: only meetings are tried here."""

    def reduce(self, buffer: Buffer, prescale: float, postscale: float) -> None:
        self._communicator.allreduce(buffer, ReduceOp.SUM, prescale, postscale)

    def add_placed(self, *_: object, **__: object) -> None:
        raise NotImplementedError

    def spread(self, buffer: Buffer) -> None:
        raise NotImplementedError

    def meet(self) -> None:
        self._communicator.barrier()


class _MeetingVote(VotedReduction):
    def __init__(
        self,
        communicator: MeetingCommunicator,
        count: int,
        dtype: DType,
        equal: tuple[ReduceOp, float],
        prescale: float,
    ) -> None:
        self._communicator, self._count, self._dtype = communicator, count, dtype
        self._equal, self._prescale = equal, prescale

    def __call__(self, ballot: bytes, source: int, target: int) -> Verdict:
        read, written = (Buffer(a, self._dtype, self._count) for a in (source, target))
        carried = Carried(read, written, self._equal, self._prescale)
        return self._communicator.vote(ballot, carried)
