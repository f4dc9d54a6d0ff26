"""Whether what happened in a trial of a channel is what may happen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from channel_operations import Value
from channel_program import BARRIER, Planned, Program
from channel_record import Fault, Outcome, Record
from channel_values import Contribution, expected
from meeting_engine import EngineFaultError

from hvdtrain.errors import HvdtrainError, MismatchError, PeerFailureError

_ZEROS = ("allreduce", "step")

# What a rank may say whose engine fails, or that is in the middle of something with one that goes.
_OF_A_FAULT = (HvdtrainError, EngineFaultError, KeyboardInterrupt)

Errors = tuple[type[BaseException], ...]


def judge(program: Program, records: Sequence[Record], fault: Fault | None) -> list[str]:
    """Return what is wrong, one line each."""
    judgement = _Judgement(program, records, fault)
    lines = [line for planned in program.operations for line in judgement.operation(planned)]
    lines += judgement.ends()
    for rank, record in enumerate(records):
        if record.left_over:
            lines.append(f"rank {rank}: {record.left_over} pending after close()")
        if fault is None and not record.complete:
            lines.append(f"rank {rank}: the program ended early")
    return lines


class _Judgement:
    """Judges one trial."""

    def __init__(self, program: Program, records: Sequence[Record], fault: Fault | None) -> None:
        self._program, self._records, self._fault = program, records, fault

    def operation(self, planned: Planned) -> Iterator[str]:
        """Judge how one operation ended."""
        number = planned.number
        submitted = [r for r, record in enumerate(self._records) if number in record.submitted]
        outcomes = {rank: self._records[rank].outcomes.get(number) for rank in submitted}
        what = f"operation {number} ({planned.name or planned.kind})"
        for rank, outcome in outcomes.items():
            if outcome is None:
                yield f"{what}, rank {rank}: no outcome"
            elif outcome.error is None:
                yield from self._done(planned, rank, submitted, outcome)
            elif not isinstance(outcome.error, self._allowed(planned, submitted)):
                yield f"{what}, rank {rank}: {outcome}"
        yield from self._alike(what, planned, outcomes)

    def _done(
        self, planned: Planned, rank: int, submitted: list[int], outcome: Outcome
    ) -> Iterator[str]:
        what = f"operation {planned.number} ({planned.name or planned.kind}), rank {rank}"
        variant = planned.variants[rank]
        alike = frozenset(r for r in submitted if planned.variants[r] == variant)
        others = set(range(self._program.size)) - alike
        if any(r in submitted and BARRIER not in (variant, planned.variants[r]) for r in others):
            yield f"{what}: done, though ranks submitted different things"
        elif others and (planned.kind not in _ZEROS or variant == BARRIER):
            yield f"{what}: done without ranks {sorted(others)}"
        elif not all(self._joined(r, planned.section) for r in others):
            yield f"{what}: done, though ranks {sorted(others)} did not all submit it or join"
        elif variant != BARRIER:
            filled = {r: self._records[r].filled[planned.number] for r in alike}
            size = self._program.size
            right = expected(Contribution(planned, size, alike, variant, filled), rank)
            if not _equal(outcome.value, right):
                yield f"{what}: {outcome.value}, not {right}"

    def _joined(self, rank: int, section: int) -> bool:
        """Return whether a rank has called join() in a section."""
        return section in self._records[rank].joined

    def _allowed(self, planned: Planned, submitted: list[int]) -> Errors:
        """Return what an operation may fail with on any rank."""
        own = self._own_errors(planned, submitted)
        if self._fault is None:
            return own
        if self._fault.deserts:
            return (MismatchError, PeerFailureError)
        return _OF_A_FAULT

    def _own_errors(self, planned: Planned, submitted: list[int]) -> Errors:
        """Return what it fails with as the program has it; nothing where it must be done."""
        variants = {planned.variants[rank] for rank in submitted}
        everywhere = len(submitted) == self._program.size
        if len(variants) > 1:
            leaves = planned.ends == "leave" and not everywhere
            return (MismatchError, PeerFailureError) if leaves else (MismatchError,)
        if everywhere:
            return ()
        if planned.ends == "leave":
            return (PeerFailureError,)
        return () if planned.kind in _ZEROS and variants == {0} else (MismatchError,)

    def _alike(
        self, what: str, planned: Planned, outcomes: dict[int, Outcome | None]
    ) -> Iterator[str]:
        """Compare the ranks, where no engine was at fault and all submitted one thing."""
        if self._fault is not None and not self._fault.deserts:
            return
        if BARRIER in planned.variants.values():
            return
        errors = {rank: outcome.error for rank, outcome in outcomes.items() if outcome}
        kinds = {None if error is None else type(error) for error in errors.values()}
        if len(kinds) > 1 and (self._fault is None or None in kinds):
            yield f"{what}: not alike on all ranks: {errors}"

    def ends(self) -> Iterator[str]:
        """Judge the joins and leaves."""
        results: dict[int, list[Value]] = {}
        for rank, record in enumerate(self._records):
            for section, outcome in record.ends.items():
                if outcome.error is None:
                    results.setdefault(section, []).append(outcome.value or [])
                elif not isinstance(outcome.error, self._allowed_at_end(outcome)):
                    yield f"rank {rank}, end of section {section}: {outcome}"
        for section, values in results.items():
            if any(value != values[0] for value in values):
                yield f"end of section {section}: not alike on all ranks: {values}"

    def _allowed_at_end(self, outcome: Outcome) -> Errors:
        """Return what a wish to join or to leave may fail with."""
        if self._fault is None:
            return ()
        # A rank that deserts may have closed by the time at which others go on.
        return (PeerFailureError,) if self._fault.deserts and not outcome.refused else _OF_A_FAULT


def _equal(got: Value | None, right: Value) -> bool:
    return (
        got is not None
        and len(got) == len(right)
        and all(
            len(a) == len(b) and np.allclose(a, b, rtol=1e-12, atol=1e-12)
            for a, b in zip(got, right, strict=True)
        )
    )
