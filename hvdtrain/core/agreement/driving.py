"""The threads of a rank that drive a channel, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NoReturn

from hvdtrain.arithmetic import in_default_arithmetic
from hvdtrain.collective import collective
from hvdtrain.core.agreement.driver import Driver
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.prepared import Prepared
from hvdtrain.core.agreement.queue import Queue
from hvdtrain.engines.communicator import Verdict
from hvdtrain.errors import HvdtrainError, RanksLostError


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
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None
        if with_thread:
            self._thread = threading.Thread(
                target=self._serve, name="hvdtrain-channel", daemon=True
            )
            self._thread.start()

    @collective
    def run_prepared(self, prepared: Prepared, data: object) -> bool:
        """Run a prepared operation; see `Channel.run_prepared`."""
        if not self._turn.acquire(blocking=False):
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
            self._follow(operation, verdict)
        except BaseException as error:
            self._fail(error)
        finally:
            self._turn.release()
            self._queue.wake_drivers()
        self.wait(operation)
        operation.outcome()
        return True

    @in_default_arithmetic
    @collective
    def wait(self, operation: Operation) -> None:
        """Drive until an operation has ended, or wait while another thread drives."""
        while not self._is_over(operation):
            if self._turn.acquire(blocking=False):
                try:
                    while not self._is_over(operation):
                        self._driver.round()
                except BaseException as error:
                    self._fail(error)
                finally:
                    self._turn.release()
                    self._queue.wake_drivers()
            else:
                self._queue.wait(operation, lambda: not self._turn.locked())
        if not operation.done:
            self._queue.wait(operation, lambda: False)  # close() ends it

    def held(self) -> threading.Lock:
        """Return a context in which no thread drives."""
        return self._turn

    def end_thread(self) -> None:
        """Wait for the end of the thread, after the queue was closed."""
        if self._thread is not None:
            self._thread.join()

    @in_default_arithmetic
    def _follow(self, operation: Operation, verdict: Verdict) -> None:
        self._driver.follow(operation, verdict)

    def _is_over(self, operation: Operation) -> bool:
        return operation.done or self._queue.closed

    @in_default_arithmetic
    def _serve(self) -> None:
        while self._queue.wait_for_work():
            with self._turn:
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
        error = self._driver.explained(error)
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
