"""The driver of a channel: performs the actions of its state machine on a communicator."""

from __future__ import annotations

import logging
import pickle
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from struct import Struct
from typing import Any, NoReturn

from hvdtrain.arithmetic import in_default_arithmetic
from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.agreement.decision import (
    Action,
    BackOff,
    EndJoin,
    Event,
    ExchangeReports,
    Fail,
    FailAll,
    Leave,
    Left,
    Notify,
    Report,
    ReportsExchanged,
    RunRequests,
    Vote,
    Voted,
)
from hvdtrain.core.agreement.operation import AgreedError, Operation
from hvdtrain.core.agreement.queue import Queue
from hvdtrain.core.agreement.request import JOIN, LEAVE, Request, unpacked
from hvdtrain.core.agreement.votes import Prepared, gather_bytes, unanimous, vote_on_batch
from hvdtrain.engines.communicator import Communicator
from hvdtrain.engines.features import Verdict
from hvdtrain.errors import (
    HvdtrainError,
    MismatchError,
    PeerFailureError,
    RanksLostError,
    SystemLimitError,
    UnsupportedError,
)
from hvdtrain.streams import HOST

# Time since the member joined, and bytes of the requests that have no number, which are at the end.
_HEADER = Struct("=di")

# Programs that give each operation another name must not fill the memory.
_MOST_NUMBERS = 4096


class ReportExchange:
    """Exchanges reports, in which requests that were exchanged before are numbers.

    All members number the requests in the same order, that of the reports in which they come first.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._requests: list[Request] = []
        self._numbers: dict[bytes, int] = {}  # by ballot

    @collective
    def __call__(self, own: Report) -> tuple[Report, ...]:
        messages = gather_bytes(self._communicator, self._packed(own))
        reports = tuple([self._unpacked(message) for message in messages])
        if len(self._requests) > _MOST_NUMBERS:
            self._requests.clear()
            self._numbers.clear()
        return reports

    def _packed(self, own: Report) -> bytes:
        # Twice the number, plus one if the request is awaited; negative if it has no number yet.
        codes, unknown = array("i"), []
        for request in own.requests:
            number = self._numbers.get(request.ballot, -1)
            if number < 0:
                unknown.append(request.packed)
            codes.append(2 * number + (request.key in own.awaited))
        texts = pickle.dumps(unknown) if unknown else b""
        header = _HEADER.pack(own.joined_seconds, len(texts))
        return header + codes.tobytes() + texts

    def _unpacked(self, message: bytes) -> Report:
        joined_seconds, size = _HEADER.unpack_from(message)
        end = len(message) - size
        codes = array("i", message[_HEADER.size : end])
        texts: Iterator[bytes] = iter(pickle.loads(message[end:]) if size else ())
        requests = [self._requests[code >> 1] if code >= 0 else self._new(texts) for code in codes]
        awaited = [r.key for r, code in zip(requests, codes, strict=True) if code & 1]
        return Report(tuple(requests), frozenset(awaited), joined_seconds)

    def _new(self, texts: Iterator[bytes]) -> Request:
        """Number the next request, unless another member has reported it in the same exchange."""
        request = unpacked(next(texts))
        number = self._numbers.setdefault(request.ballot, len(self._requests))
        if number == len(self._requests):
            self._requests.append(request)
        return self._requests[number]


_logger = logging.getLogger("hvdtrain")

# Size of the memory in which small operations are run as a batch.
_BATCH_BYTES = 4 << 20


class Driver:
    """Calls the primitives of a communicator, from one thread at a time."""

    def __init__(
        self,
        communicator: Communicator,
        queue: Queue,
        ranks: Sequence[int],
        title: str,
        answer: Callable[[Request], Operation],
        joined: Callable[[], None],
    ) -> None:
        self.communicator, self._queue = communicator, queue
        self._ranks, self._title = tuple(ranks), title
        self._answer, self._joined = answer, joined
        self._reports = ReportExchange(communicator)
        self._own: dict[str, Operation] = {}  # those that this rank has reported to the others
        self._doing: Sequence[Operation] = ()
        self._run_by_vote: Sequence[Operation] = ()  # and not ended yet
        self._memory: Buffer | None = None
        self._handlers: dict[type[Action], Callable[[Any], Event | None]] = {
            Vote: self._vote,
            ExchangeReports: self._exchange,
            RunRequests: self._run,
            Fail: lambda action: self._fail(action.reasons, MismatchError),
            Leave: self._leave,
            FailAll: lambda action: self._fail(
                dict.fromkeys(self._own, action.reason), PeerFailureError
            ),
            EndJoin: self._end_join,
            Notify: lambda action: queue.call_listeners(action.ranks),
            BackOff: lambda _: queue.back_off(),
        }

    @property
    def subject(self) -> str:
        """The first three of the operations that were run or proposed last, for messages."""
        subjects = [operation.request.subject for operation in self._doing[:3]]
        return ", ".join(subjects) or "a vote"

    @collective
    def round(self) -> None:
        """Take part in one round and perform its actions."""
        self._own, actions = self._queue.begin_round()
        self._doing = list(self._own.values())
        if self._doing and (track := self._queue.track) is not None:
            track.proposed(self._doing[0])
        self._perform(actions)

    @collective
    def vote_prepared(self, prepared: Prepared, data: object) -> Verdict:
        """Take part in a round with a prepared operation alone."""
        self._doing = (prepared,)
        return prepared.vote(self.communicator, data)

    @in_default_arithmetic
    @collective
    def follow(self, operation: Operation, verdict: Verdict) -> None:
        """Perform the actions of a round whose prepared operation is not done."""
        self._doing, self._own = (operation,), {operation.request.key: operation}
        proposed = (operation.request,)
        agreed = proposed if verdict is Verdict.AGREED else ()
        self._perform(self._queue.apply(Voted(proposed, agreed)))

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            event = self._handlers[type(action)](action)
            if event is not None:
                self._perform(self._queue.apply(event))

    @collective
    def _vote(self, action: Vote) -> Voted:
        requests, operations = action.requests, list(self._own.values())
        if not self._queue.timed and _is_batch(operations):
            positions, done = vote_on_batch(self.communicator, operations)
            self._run_by_vote = [operations[position] for position in positions] if done else ()
        else:
            positions = unanimous(self.communicator, requests)
        if len(positions) == len(requests) == 1:
            return Voted(requests, requests)
        return Voted(requests, tuple(requests[position] for position in positions))

    def _end_join(self, action: EndJoin) -> None:
        self._joined()
        self._queue.end(self._own[JOIN.key], result=action.order)

    def _exchange(self, _: ExchangeReports) -> ReportsExchanged:
        operations, own = self._queue.report()
        self._own = {operation.request.key: operation for operation in operations}
        reports = self._reports(own)
        if (track := self._queue.track) is not None:
            track.agreed()
        return ReportsExchanged(reports, self._ranks, own)

    def _fail(self, reasons: Mapping[str, str], error: type[HvdtrainError]) -> None:
        self._queue.reset_back_off()
        for key, reason in reasons.items():
            if (operation := self._own.get(key)) is not None:
                self._end_with(operation, reason, error)

    def _leave(self, action: Leave) -> Left:
        for key, reason in action.unmet.items():
            if (operation := self._own.get(key)) is not None:
                self._end_with(operation, reason, PeerFailureError)
        self._queue.end(self._own[LEAVE.key])
        return Left()

    def _end_with(self, operation: Operation, reason: str, error: type[HvdtrainError]) -> None:
        message = f"{self._title} {operation.request.subject}: {reason}"
        # A program that leaves or joins may never ask for its result.
        if not operation.waiters and (LEAVE.key in self._own or JOIN.key in self._own):
            _logger.warning(message)
        self._queue.end(operation, error(message))

    def _run(self, action: RunRequests) -> None:
        """Run operations of all members; successive ones with equal batch keys as a batch."""
        self._queue.reset_back_off()
        if self._run_by_vote:
            done, self._run_by_vote = self._run_by_vote, ()
            self._queue.end_all(done)
            return
        own, answer = self._own, self._answer
        operations = [own.get(request.key) or answer(request) for request in action.requests]
        keys = [operation.batch_key() for operation in operations]
        start = 0
        for key, equal in groupby(keys):
            end = start + len(list(equal))
            batch, start = operations[start:end], end
            if key is not None and len(batch) > 1:
                self._run_batch(batch)
            else:
                for operation in batch:
                    self._run_one(operation)

    def _run_batch(self, operations: Sequence[Operation]) -> None:
        self._began(operations)
        for operation in operations:
            if operation.streams is not HOST:
                operation.streams.settle(operation.mark)  # batches are in host memory
        first, *others = operations
        first.execute_batch(others, self.communicator, self._batch_memory)
        self._queue.end_all(operations)

    def _batch_memory(self) -> Buffer:
        if self._memory is None:
            self._memory = Buffer.of(self.communicator.empty(_BATCH_BYTES))
        return self._memory

    def _run_one(self, operation: Operation) -> None:
        self._began([operation])
        try:
            result = operation.run(self.communicator)
        except AgreedError as error:
            self._queue.end(operation, error.error)
        # The engines of all members refuse it.
        except (SystemLimitError, UnsupportedError) as error:
            self._queue.end(operation, error)
        else:
            self._queue.end(operation, result=result)

    def _began(self, operations: Sequence[Operation]) -> None:
        self._doing = operations
        if (track := self._queue.track) is not None:
            for operation in operations:
                track.began(operation)


def _is_batch(operations: Sequence[Operation]) -> bool:
    """Return whether these operations, in host memory, can run as one."""
    key = operations[0].batch_key() if operations else None
    return key is not None and all(o.batch_key() == key and o.streams is HOST for o in operations)


class Driving:
    """Has one thread at a time take part in rounds: the channel's own or one that waits anyway."""

    def __init__(
        self,
        driver: Driver,
        queue: Queue,
        title: str,
        failed: Callable[[str], None] | None,
        lost: Callable[[], None] | None,
        with_thread: bool,
    ) -> None:
        self._driver, self._queue = driver, queue
        self._title, self._failed, self._lost = title, failed, lost
        self.turn = threading.Lock()  # of the thread that drives
        self._thread: threading.Thread | None = None
        if with_thread:
            self._thread = threading.Thread(
                target=self._serve, name="hvdtrain-channel", daemon=True
            )
            self._thread.start()

    @collective
    def run_prepared(self, prepared: Prepared, data: object) -> bool:
        if not self.turn.acquire(blocking=False):
            return False
        try:
            if not self._queue.admit(prepared):
                return False
            verdict = self._driver.vote_prepared(prepared, data)
            if verdict is Verdict.DONE:
                self._queue.settle(prepared)
                return True
            operation = prepared.operation(data)
            self._queue.replace(prepared, operation)
            self._driver.follow(operation, verdict)
        except BaseException as error:
            self._fail(error)
        finally:
            self.turn.release()
            self._queue.wake_drivers()
        self.wait(operation)
        operation.outcome()
        return True

    @in_default_arithmetic
    @collective
    def wait(self, operation: Operation) -> None:
        """Drive until an operation has ended, or wait while another thread drives."""
        while not self._is_over(operation):
            if self.turn.acquire(blocking=False):
                try:
                    while not self._is_over(operation):
                        self._driver.round()
                except BaseException as error:
                    self._fail(error)
                finally:
                    self.turn.release()
                    self._queue.wake_drivers()
            else:
                self._queue.wait(operation, lambda: not self.turn.locked())
        if not operation.done:
            self._queue.wait(operation, lambda: False)  # close() ends it

    def end_thread(self) -> None:
        """Wait for the end of the thread, after the queue was closed."""
        if self._thread is not None:
            self._thread.join()

    def _is_over(self, operation: Operation) -> bool:
        return operation.done or self._queue.closed

    @in_default_arithmetic
    def _serve(self) -> None:
        while self._queue.wait_for_work():
            with self.turn:
                try:
                    while self._queue.busy:
                        self._driver.round()
                except Exception as error:
                    self._give_up(error)
            self._queue.wake_drivers()

    def _fail(self, error: BaseException) -> NoReturn:
        """Close the channel after an error, and raise what it means."""
        explained = self._give_up(error)
        if explained is error:
            raise error
        raise explained from error

    def _give_up(self, error: BaseException) -> BaseException:
        """Close the channel after an error: a rank cannot withdraw from a round."""
        subject = self._driver.subject
        error = self._driver.communicator.explained(error)
        if isinstance(error, RanksLostError):
            if self._lost is not None:
                self._lost()
            self._queue.give_up(error)
        elif isinstance(error, Exception):
            error.add_note(f"This happened in {subject}.")
            self._queue.give_up(error)
            if self._failed is not None:
                self._failed(f"{subject}: {type(error).__name__}: {error}")
        else:  # a signal's handler raised, in the thread that waits
            reason = f"{self._title}: {type(error).__name__} in the middle of an operation"
            self._queue.give_up(HvdtrainError(f"{reason}; end this rank"))
        return error
