"""What must come of an operation, by formula from what the ranks contributed."""

import random
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from channel_player import Fault, Outcome, Player, Record
from channel_program import BARRIER, OTHER, Planned, Program, Value, data, make_program, rows
from meeting_engine import PROGRAM, EngineFault, EngineFaultError, Group, Referee

from hvdtrain.errors import HvdtrainError, MismatchError, PeerFailureError
from hvdtrain.types import ReduceOp


@dataclass(frozen=True)
class Contribution:
    planned: Planned
    size: int
    ranks: frozenset[int]
    variant: int
    filled: Mapping[int, int]


def expected(given: Contribution, rank: int) -> Value:
    planned = given.planned
    counts = [count + (given.variant == OTHER) for count in planned.counts]
    match planned.kind:
        case "allreduce":
            return [_reduced(given, *part).tolist() for part in enumerate(counts)]
        case "broadcast":
            return [data(planned, planned.number % given.size, 0, counts[0]).tolist()]
        case "allgather":
            every = [rows(planned, other) for other in range(given.size)]
            parts = [data(planned, other, 0, n * counts[0]) for other, n in enumerate(every)]
            return [np.concatenate(parts).tolist(), every]
        case "split":
            members = planned.members
            return [[members.index(rank), len(members)]] if rank in members else []
        case "memory":
            return [[64 * counts[0]]]
        case "step":
            return _step(given)
    return []


def _reduced(given: Contribution, part: int, count: int) -> npt.NDArray[np.float64]:
    planned = given.planned
    terms = np.zeros((given.size, count))
    for rank in given.ranks:
        terms[rank] = data(planned, rank, part, count).astype(np.float64) * planned.prescale
    if planned.op is ReduceOp.MAX:
        return terms.max(axis=0)
    total = terms.sum(axis=0)
    if planned.op is ReduceOp.SUM:
        return total
    average = total / given.size
    return np.trunc(average) if planned.dtype.is_integer else average


def _step(given: Contribution) -> Value:
    planned = given.planned
    weights = {r: planned.weights[r] for r in given.ranks}
    weighted = any(weight is not None for weight in weights.values())
    share = {r: 1.0 if weight is None else weight for r, weight in weights.items()}
    divisor = sum(share.values()) if weighted else float(given.size)
    if planned.op is ReduceOp.SUM:
        share, divisor = dict.fromkeys(share, 1.0), 1.0
    parts = []
    for part, count in enumerate(planned.counts):
        total = np.zeros(count)
        for r in given.ranks:
            if part < given.filled[r]:
                total += share[r] * data(planned, r, part, count).astype(np.float64)
        parts.append((total / divisor).tolist())
    return [*parts, [planned.number * len(given.ranks), sum(r + 1 for r in given.ranks)]]


_ZEROS = ("allreduce", "step")

# What a rank may say whose engine fails, or that is in the middle of something with one that goes.
_OF_A_FAULT = (HvdtrainError, EngineFaultError, KeyboardInterrupt)

Errors = tuple[type[BaseException], ...]


def judge(program: Program, records: Sequence[Record], fault: Fault | None) -> list[str]:
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
    def __init__(self, program: Program, records: Sequence[Record], fault: Fault | None) -> None:
        self._program, self._records, self._fault = program, records, fault

    def operation(self, planned: Planned) -> Iterator[str]:
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
        return section in self._records[rank].joined

    def _allowed(self, planned: Planned, submitted: list[int]) -> Errors:
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


# How long a trial may take, of milliseconds, before it counts as one that hangs.
HANG_SECONDS = 120.0


def sound_trial(seed: int) -> list[str]:
    return _try(make_program(seed), None)


def faulty_trial(seed: int) -> list[str]:
    program = make_program(seed)
    return _try(program, _make_fault(program))


def _make_fault(program: Program) -> Fault:
    chance = random.Random(-1 - program.seed)
    rank = chance.randrange(program.size)
    kind = chance.choice(("fails", "dies", "interrupted", "leaves", "closes"))
    if kind in ("leaves", "closes"):
        return Fault(rank, stops=chance.choice(_places(program, rank)), closes=kind == "closes")
    call = chance.randrange(chance.choice((4, 10, 30)))
    arrives = chance.random() < 0.3
    engine = EngineFault(call, arrives, dies=kind == "dies", interrupted=kind == "interrupted")
    return Fault(rank, engine, closes=chance.random() < 0.5)


def _places(program: Program, rank: int) -> list[int]:
    """Return where a program may end early: before it leaves, and not while it has joined."""
    places, joined = [], False
    for number, act in enumerate(program.acts[rank]):
        if not joined:
            places.append(number)
        if act.kind == "leave":
            break
        joined = (joined or act.kind == "join") and act.kind != "finish"
    return places


def _try(program: Program, fault: Fault | None) -> list[str]:
    referee = Referee(lenient=fault is not None)
    group = Group(referee, program.size, "trial")
    before = set(threading.enumerate())
    players = [Player(program, rank, group, fault) for rank in range(program.size)]
    deadline = time.monotonic() + HANG_SECONDS
    programs = [
        threading.Thread(target=player.run, name=PROGRAM, daemon=True) for player in players
    ]
    for thread in programs:
        thread.start()
    if _hung(programs, deadline, referee, "a program hangs"):
        for player in players:
            player.break_off()
    others = [thread for thread in threading.enumerate() if thread not in before]
    _hung(others, deadline, referee, "a thread is left")
    referee.check_released()
    lines = referee.faults + judge(program, [player.record for player in players], fault)
    return [f"seed {program.seed} ({fault or 'no fault'}): {line}" for line in lines]


def _hung(
    threads: Sequence[threading.Thread], deadline: float, referee: Referee, fault: str
) -> bool:
    """Wait for threads; note a fault and return True if one does not end."""
    for thread in threads:
        with suppress(RuntimeError):  # a program that hangs may be about to start another one
            thread.join(max(0.0, deadline - time.monotonic()))
    frames = sys._current_frames()
    found = [frames.get(thread.ident or 0) for thread in threads if thread.is_alive()]
    if found:
        stacks = ["".join(traceback.format_stack(frame)[-5:]) for frame in found if frame]
        referee.blame_aloud(f"{fault}:\n" + "\n".join(stacks))
    return bool(found)
