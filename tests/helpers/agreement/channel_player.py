"""What goes wrong in a trial of a channel, and what happens in it."""

import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from channel_program import NEVER, Act, Made, Planned, Program, Value, make
from meeting_engine import EngineFault, EngineFaultError, Group, MeetingCommunicator

from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.collectives.allreduce import PlannedAllreduce
from hvdtrain.core.membership import answer_with_zeros
from hvdtrain.engines.communicator import poll_until
from hvdtrain.errors import ConnectionLostError, HvdtrainError, MismatchError

# In place of a section: the leave of a program that ends before its time.
GAVE_UP = -1


@dataclass(frozen=True)
class Fault:
    rank: int
    engine: EngineFault | None = None
    stops: int | None = None
    closes: bool = False

    @property
    def deserts(self) -> bool:
        """Whether the engine does what it should, and a rank only leaves early."""
        return self.engine is None and not self.closes

    def __str__(self) -> str:
        end = "closes" if self.closes else "leaves"
        if self.engine is None:
            return f"rank {self.rank} {end} before act {self.stops}"
        return f"rank {self.rank}: {self.engine}, and then {end}"


@dataclass
class Outcome:
    value: Value | None = None
    error: BaseException | None = None
    refused: bool = False

    def __str__(self) -> str:
        if self.error is None:
            return f"done with {self.value}"
        kind = "refused" if self.refused else "failed"
        return f"{kind} with {type(self.error).__name__}: {self.error}"


@dataclass
class Record:
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    ends: dict[int, Outcome] = field(default_factory=dict)
    filled: Counter[int] = field(default_factory=Counter)
    submitted: set[int] = field(default_factory=set)
    left_over: list[str] = field(default_factory=list)
    joined: set[int] = field(default_factory=set)
    complete: bool = False


class OverError(Exception):
    """The rest of a program is not played."""


# After one of these no call of the engine can come to a good end.
_LOST = (ConnectionLostError, EngineFaultError, KeyboardInterrupt)


class Player:
    def __init__(self, program: Program, rank: int, group: Group, fault: Fault | None) -> None:
        self.record = Record()
        self._program, self._rank, self._group = program, rank, group
        own = fault if fault is not None and fault.rank == rank else None
        self._stops = None if own is None else own.stops
        self._closes = fault is not None and fault.closes
        engine = None if own is None else own.engine
        communicator = MeetingCommunicator(group, rank, program.threaded, engine)
        title, members = f"[rank {rank}/{program.size}]", range(program.size)
        self._channel = Channel(
            communicator, members, title, answer_with_zeros, "trial", self._note_failure
        )
        self._made: dict[int, Made] = {}
        self._section = 0
        self._end: Operation | None = None
        self._leaves = False
        self._failed = False
        self._called = threading.Event()
        self._beside: list[threading.Thread] = []  # other threads of the program
        self._chance = random.Random(program.seed * 8 + rank)

    def run(self) -> None:
        try:
            self._play()
        except BaseException:
            self._group.referee.blame_aloud(f"rank {self._rank}: {traceback.format_exc()}")
        finally:
            self._group.cut_off(self._rank)

    def break_off(self) -> None:
        """End what is pending, so that a trial that hangs leaves no thread behind."""
        self._note_failure()
        for operation in self._channel.queue.operations():
            operation.abandon()  # a step may wait for buckets that the program will not fill
            self._channel.queue.end(operation, ConnectionLostError("the trial is over"))

    def _play(self) -> None:
        try:
            for number, act in enumerate(self._program.acts[self._rank]):
                if number == self._stops:
                    raise OverError
                self._do(act)
            self.record.complete = True
        except OverError:
            self._give_up()
        self.record.left_over = [request.key for request, _ in self._channel.pending()]
        self._conclude()

    def _give_up(self) -> None:
        """End as programs do in which an operation has failed: leave, or not even that; close."""
        errors = [outcome.error for outcome in list(self.record.outcomes.values())]
        lost = any(isinstance(error, _LOST) for error in errors)
        if self._closes and (lost or self._stops is not None):
            self._deafen()
        else:  # whatever is under way
            self._leaves, self._section = True, GAVE_UP
            self._deafen()
            self._leave()
            self._finish()
        self._close()

    def _do(self, act: Act) -> None:
        method = getattr(self, f"_{act.kind}")
        if act.number < 0:
            method()
        else:
            method(self._program.operations[act.number])

    def _conclude(self) -> None:
        for thread in self._beside:
            thread.join()
        self._leaves = True
        for number, made in self._made.items():
            if made.operation.done:  # else a wait would be one for ever
                self._wait(self._program.operations[number])

    def _note_failure(self, _: str = "") -> None:
        """Note that the channel is closed for good: nobody will call a listener (any thread)."""
        self._failed = True
        self._called.set()

    def _make(self, planned: Planned) -> Made:
        if planned.number not in self._made:
            name: Callable[[str, str | None], str] = self._channel.name
            made = make(planned, self._rank, self._program.size, name)
            if made.repeat is not None and self._chance.random() < 0.5:
                made.operation = made.repeat()
            self._made[planned.number] = made
        return self._made[planned.number]

    def _submit(self, planned: Planned, at_once: bool = False) -> None:
        made = self._make(planned)
        try:
            self._channel.submit(made.operation, at_once=at_once)
        except HvdtrainError as error:
            self._note(planned, Outcome(error=error, refused=True))
        else:
            self.record.submitted.add(planned.number)

    def _hurry(self, planned: Planned) -> None:
        self._submit(planned, at_once=True)

    def _fill(self, planned: Planned) -> None:
        step = self._make(planned).step
        assert step is not None
        step.launch()
        number = planned.number
        self.record.filled[number] += 1
        first = self.record.filled[number] == 1
        if first if self._channel.has_thread else step.complete:
            self._submit(planned, at_once=True)

    def _run(self, planned: Planned) -> None:
        made = self._make(planned)
        self.record.submitted.add(planned.number)
        self._note_result(planned, lambda: self._run_or_repeat(made.operation))

    def _run_or_repeat(self, operation: Operation) -> object:
        if isinstance(operation, PlannedAllreduce) and self._chance.random() < 0.5:
            plan, name = operation.plan, operation.request.name
            plan.find_voted(self._channel.communicator)
            begun = SimpleNamespace(request=plan.request, steps=plan.steps, finish=plan.finish)
            begun.operation = lambda *_: operation
            terms: Any = (name, 0, operation.pieces().__getitem__, lambda _: 1)
            if plan.request.name and self._channel.repeat(begun, *terms) is not None:
                return operation.outcome()
        return self._channel.run(operation)

    def _wait(self, planned: Planned) -> None:
        number = planned.number
        if number not in self.record.submitted or number in self.record.outcomes:
            return
        made = self._made[number]
        if made.step is not None and self._channel.has_thread and self._chance.random() < 0.5:
            self._note_result(planned, lambda: self._wait_for_buckets(made))
        else:
            self._note_result(planned, lambda: self._channel.wait(made.operation))

    def _wait_beside(self, planned: Planned) -> None:
        thread = threading.Thread(target=self._wait_quietly, args=[planned], daemon=True)
        self._beside.append(thread)
        thread.start()

    def _wait_quietly(self, planned: Planned) -> None:
        try:
            self._wait(planned)
        except OverError:
            pass  # the main thread will meet an error of its own

    def _wait_for_buckets(self, made: Made) -> None:
        assert made.step is not None
        with self._channel.waiting(made.operation):
            for reduced in made.step.reduced:
                reduced.result()
            made.step.added.result()

    def _note_result(self, planned: Planned, wait: Callable[[], object]) -> None:
        try:
            value = self._made[planned.number].read(wait())
        except BaseException as error:
            refused = not self._made[planned.number].operation.done
            if refused:
                self.record.submitted.discard(planned.number)
            self._note(planned, Outcome(error=error, refused=refused))
        else:
            self._note(planned, Outcome(value))

    def _note(self, planned: Planned, outcome: Outcome) -> None:
        self.record.outcomes[planned.number] = outcome
        if outcome.error is not None and not isinstance(outcome.error, MismatchError):
            self._stop()

    def _stop(self) -> None:
        """End a program that has met an error which no program could go on after."""
        if not self._leaves:
            raise OverError

    def _poll(self) -> None:
        open_ = [n for n in list(self.record.submitted) if n not in self.record.outcomes]
        # To ask for what never comes is to wait for it; without a thread it blocks at once.
        open_ = [n for n in open_ if self._program.operations[n].ready < NEVER]
        if open_ and self._channel.has_thread:
            self._channel.poll(self._made[self._chance.choice(sorted(open_))].operation)

    def _rest(self) -> None:
        time.sleep(self._chance.choice((0.0, 1e-4, 1e-3)))

    def _listen(self) -> None:
        self._channel.listen(self._hear)

    def _hear(self, _: Sequence[int]) -> None:
        """Be told that another rank is blocked."""

    def _be_called(self, _: Sequence[int]) -> None:
        self._called.set()

    def _deafen(self) -> None:
        """Take part in rounds only with what is submitted."""
        for listener in (self._hear, self._hear, self._be_called):
            self._channel.unlisten(listener)

    def _attend(self) -> None:
        """Be busy elsewhere until another rank is blocked in what this one has not submitted."""
        self._called.clear()
        if self._channel.has_thread and not self._failed:
            self._channel.listen(self._be_called)
            self._called.wait()
            self._channel.unlisten(self._be_called)

    def _join(self) -> None:
        self.record.joined.add(self._section)
        self._begin_end(self._channel.join)

    def _leave(self) -> None:
        self._leaves = True
        self._begin_end(self._channel.leave)

    def _begin_end(self, begin: Callable[[], Operation]) -> None:
        try:
            self._end = begin()
        except HvdtrainError as error:
            self._end = None
            self.record.ends[self._section] = Outcome(error=error, refused=True)
            self._stop()

    def _finish(self) -> None:
        end, self._end = self._end, None
        if end is None:
            return
        try:
            if self._leaves and self._chance.random() < 0.5:
                poll_until(lambda: self._channel.poll(end))
            last = self._channel.wait(end)
        except BaseException as error:
            self.record.ends[self._section] = Outcome(error=error)
            self._stop()
        else:
            self.record.ends[self._section] = Outcome([] if last is None else [[last]])
        self._section += 1

    def _close(self) -> None:
        self._channel.close()
