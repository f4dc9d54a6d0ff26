"""Warnings of the stall watch, and the decision to end the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hvdtrain.core.process.exits import write_message
from hvdtrain.core.process.output import drain_output
from hvdtrain.core.stall.finding import OperationId, Stall, StallSettings, describe
from hvdtrain.errors import EXIT_CRASH
from hvdtrain.topology import Topology

_MOST_LINES = 8
_ADVICE = "Every rank must submit the same operations: see what those ranks do instead"
_OFFER = " (HVDTRAIN_STALL_STACKS=1 shows it)"


class StallWarnings:
    """Warns on stderr, once per period for each stall."""

    def __init__(
        self, settings: StallSettings, topology: Topology, abort: Callable[[int], None]
    ) -> None:
        self._settings = settings
        self._topology = topology
        self._abort = abort
        self._reported: dict[OperationId, Stall] = {}

    def update(self, stalls: Sequence[Stall], stacks: Callable[[], Mapping[int, str]]) -> None:
        """Report new and ended stalls; end the job if a stall is too old."""
        found = {stall.id: stall for stall in stalls}
        over = [stall for id, stall in self._reported.items() if id not in found]
        if over:
            self._say(f"no longer stalled: {_list([stall.subject for stall in over], ', ')}")
        self._reported = {id: s for id, s in self._reported.items() if id in found}
        if any(map(self._is_due, stalls)):
            self._warn(stalls, stacks)
            self._reported = found
        for stall in stalls:
            if stall.seconds >= self._settings.shutdown_seconds and not stall.is_marker:
                self._end_job(stall)

    def _is_due(self, stall: Stall) -> bool:
        before = self._reported.get(stall.id)
        periods = self._settings.periods
        return periods(stall.seconds) > (periods(before.seconds) if before else 0)

    def _warn(self, stalls: Sequence[Stall], stacks: Callable[[], Mapping[int, str]]) -> None:
        self._say(_list([f"stalled: {describe(stall)}" for stall in stalls], "\n"))
        if any((s.missing or s.partial) and not s.is_marker for s in stalls):
            self._say(_ADVICE if self._settings.stacks else _ADVICE + _OFFER)
        if self._settings.stacks:
            for rank, text in stacks().items():
                write_message(f"[rank {rank}/{self._topology.size}]", text)

    def _end_job(self, stall: Stall) -> None:
        seconds = self._settings.shutdown_seconds
        self._say(f"the job ends (HVDTRAIN_STALL_SHUTDOWN_SECONDS={seconds:g}): {describe(stall)}")
        drain_output()
        self._abort(EXIT_CRASH)

    def _say(self, text: str) -> None:
        write_message(self._topology.title, text)


def _list(texts: Sequence[str], separator: str) -> str:
    more = len(texts) - _MOST_LINES
    shown = [*texts[:_MOST_LINES], *([f"and {more} more operations"] if more > 0 else [])]
    return separator.join(shown)
