"""Plays the program of one rank on a real channel."""

from __future__ import annotations

import traceback

from channel_actor import Actor, OverError
from channel_program import Program
from channel_record import GAVE_UP, Fault, Record
from meeting_engine import EngineFaultError, MeetingCommunicator
from meeting_group import Group

from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.membership.world import answer_with_zeros
from hvdtrain.errors import ConnectionLostError

# After one of these no call of the engine can come to a good end.
_LOST = (ConnectionLostError, EngineFaultError, KeyboardInterrupt)


class Player:
    """Plays the program of one rank."""

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
        self._actor = Actor(program, rank, self._channel, self.record)

    def run(self) -> None:
        """Play it, and note what happens."""
        try:
            self._play()
        except BaseException:
            self._group.referee.blame_aloud(f"rank {self._rank}: {traceback.format_exc()}")
        finally:
            self._group.cut_off(self._rank)

    def break_off(self) -> None:
        """End what is pending, so that a trial that hangs leaves no thread behind."""
        self._actor.note_failure()
        for operation in self._channel._queue.operations():
            operation.abandon()  # a step may wait for buckets that the program will not fill
            self._channel._queue.end(operation, ConnectionLostError("the trial is over"))

    def _note_failure(self, reason: str) -> None:
        self._actor.note_failure()

    def _play(self) -> None:
        try:
            for number, act in enumerate(self._program.acts[self._rank]):
                if number == self._stops:
                    raise OverError
                self._actor.do(act)
            self.record.complete = True
        except OverError:
            self._give_up()
        self.record.left_over = [request.key for request, _ in self._channel.pending()]
        self._actor.conclude()

    def _give_up(self) -> None:
        """End as programs do in which an operation has failed: leave, or not even that; close."""
        errors = [outcome.error for outcome in list(self.record.outcomes.values())]
        lost = any(isinstance(error, _LOST) for error in errors)
        if self._closes and (lost or self._stops is not None):
            self._actor.stop_listening()
            self._channel.close()
        else:
            self._actor.leave_now(GAVE_UP)
