"""What the ranks of a trial do: which operations they submit, of which data, and their waits."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.operation import Operation, Request, Work
from hvdtrain.core.collectives.allreduce import Allreduce, AllreducePlan, PlannedAllreduce
from hvdtrain.core.collectives.gathers import allgather, allocate, broadcast, split
from hvdtrain.core.exchanges import allreduce
from hvdtrain.core.gradients.reducer import step_request
from hvdtrain.core.gradients.step import GradientStep
from hvdtrain.core.gradients.step_info import OwnStep
from hvdtrain.types import DType, ReduceOp

# In place of the planned operation a rank submits the same with another shape, or a barrier.
OTHER, BARRIER = 1, 2

# Of an operation for which a program does not wait before its section ends.
NEVER = 99


@dataclass
class Planned:
    number: int
    kind: str
    name: str
    ends: str
    section: int
    op: ReduceOp = ReduceOp.SUM
    dtype: DType = DType.FLOAT64
    counts: tuple[int, ...] = (1,)
    prescale: float = 1.0
    variants: dict[int, int] = field(default_factory=dict)
    filled: dict[int, int] = field(default_factory=dict)
    weights: dict[int, float | None] = field(default_factory=dict)
    members: tuple[int, ...] = ()
    attending: tuple[int, ...] = ()
    ready: int = NEVER


@dataclass(frozen=True)
class Act:
    kind: str
    number: int = -1


@dataclass
class Program:
    seed: int
    size: int
    threaded: bool
    plans: dict[str, tuple[int, ...]]
    operations: list[Planned]
    acts: list[list[Act]]


_KINDS = (*("allreduce",) * 6, *("step",) * 3, *("broadcast", "allgather", "barrier") * 2)
_RUN_KINDS = (*_KINDS, "split", "memory")
_NAMED = ("split", "memory")


def make_program(seed: int) -> Program:
    chance = random.Random(seed)
    size, threaded = chance.choice((2, 2, 3, 3, 4)), chance.random() < 0.75
    plans = {
        name: tuple(chance.randint(1, 4) for _ in range(chance.randint(1, 3)))
        for name in ("plan a", "plan b")
    }
    program = Program(seed, size, threaded, plans, [], [[] for _ in range(size)])
    joins = chance.choice((0, 0, 1, 1, 2))
    for number in range(joins + 1):
        _Section(program, number, "join" if number < joins else "leave", chance).write()
    for acts in program.acts:
        acts.append(Act("close"))
    return program


class _Section:
    def __init__(self, program: Program, number: int, ends: str, chance: random.Random) -> None:
        self._program, self._number, self._ends, self._chance = program, number, ends, chance
        self._phases = chance.choice((1, 1, 2, 3))
        last = self._phases - 1
        self._last = [
            chance.randint(0, last) if ends == "join" else last for _ in range(program.size)
        ]
        self._last[chance.randrange(program.size)] = last
        self._plans = set(program.plans)  # those that are not left half-done
        self._stepped = set[tuple[int, str]]()  # in a phase each is used once
        # For each phase and rank what is submitted, and what all run in one order.
        self._begun: list[list[list[Planned]]] = [
            [[] for _ in range(program.size)] for _ in range(self._phases)
        ]
        self._run: list[list[Planned]] = [[] for _ in range(self._phases)]

    def write(self) -> None:
        for phase in range(self._phases):
            for _ in range(self._chance.choice((0, 1, 2, 3, 4))):
                self._plan(phase)
            if phase < self._phases - 1:
                for _ in range(self._chance.choice((0, 0, 1, 2))):
                    self._plan_run(phase)
        for rank in range(self._program.size):
            self._write(rank)

    def _plan(self, phase: int) -> None:
        """Plan an operation that ranks submit in any order, some of them not at all perhaps."""
        planned = self._new(self._chance.choice(_KINDS))
        active = [rank for rank, last in enumerate(self._last) if last >= phase]
        everywhere = self._chance.random() < 0.65
        if not everywhere:
            active = self._chance.sample(active, self._chance.randint(1, len(active)))
        if planned.kind == "step":
            self._plan_step(planned, phase, active)
            return
        phases = {rank: self._delayed(phase, rank) for rank in active}
        for rank, when in phases.items():
            self._begun[when][rank].append(planned)
        self._vary(planned, active, (OTHER, BARRIER))
        if BARRIER not in planned.variants.values():
            planned.ready = self._readiness(phases)

    def _delayed(self, phase: int, rank: int) -> int:
        late = self._chance.random() < 0.2
        return self._chance.randint(phase, self._last[rank]) if late else phase

    def _plan_step(self, planned: Planned, phase: int, active: list[int]) -> None:
        chance, size = self._chance, self._program.size
        planned.name = chance.choice(list(self._program.plans))
        if planned.name not in self._plans or (phase, planned.name) in self._stepped:
            self._program.operations.remove(planned)
            return
        self._stepped.add((phase, planned.name))
        planned.counts = self._program.plans[planned.name]
        planned.op = chance.choice((ReduceOp.SUM, ReduceOp.AVERAGE))
        weighs = chance.random() < 0.3
        buckets = len(planned.counts)
        for rank in active:
            abandoned = self._last[rank] == phase and chance.random() < 0.3
            planned.filled[rank] = chance.randint(1, buckets) if abandoned else buckets
            planned.weights[rank] = chance.choice((None, 1.0, 2.5)) if weighs else None
        # Without a thread of the channel's, a step is submitted when it is complete.
        if not self._program.threaded:
            active = [rank for rank in active if planned.filled[rank] == buckets]
        for rank in planned.filled:
            self._begun[phase][rank].append(planned)
        self._vary(planned, active, (OTHER,))
        planned.ready = self._readiness(dict.fromkeys(active, phase))
        expected = [rank for rank in range(size) if self._last[rank] >= phase]
        if active != expected or planned.ready > phase:
            self._plans.discard(planned.name)

    def _plan_run(self, phase: int) -> None:
        """Plan an operation that every rank runs which has not joined."""
        planned = self._new(self._chance.choice(_RUN_KINDS))
        if planned.kind == "step":
            planned.kind = "allreduce"
        if planned.kind not in _NAMED and self._chance.random() < 0.4:
            planned.name = ""
        active = [rank for rank, last in enumerate(self._last) if last > phase]
        planned.members = tuple(
            self._chance.sample(range(len(self._last)), self._chance.randint(1, len(self._last)))
        )
        kinds = (OTHER, BARRIER) if planned.name and len(active) == len(self._last) else (OTHER,)
        self._vary(planned, active, kinds)
        if self._chance.random() < 0.3:  # somebody comes at once
            others = self._chance.randint(0, len(active) - 1)
            planned.attending = tuple(self._chance.sample(active, others))
        self._run[phase].append(planned)

    def _new(self, kind: str) -> Planned:
        chance, number = self._chance, len(self._program.operations)
        planned = Planned(number, kind, f"{kind} {number}", self._ends, self._number)
        planned.op = chance.choice((ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MAX))
        planned.dtype = chance.choice((DType.FLOAT64, DType.INT64))
        planned.counts = tuple(chance.randint(1, 4) for _ in range(chance.choice((1, 1, 2))))
        planned.prescale = chance.choice((1.0, 1.0, 2.0))
        self._program.operations.append(planned)
        return planned

    def _vary(self, planned: Planned, ranks: Sequence[int], kinds: Sequence[int]) -> None:
        """Have all ranks submit the same, or some of them something else."""
        planned.variants = dict.fromkeys(ranks, 0)
        if ranks and planned.kind not in ("barrier", "split") and self._chance.random() < 0.12:
            variant = self._chance.choice(kinds)
            for rank in self._chance.sample(list(ranks), self._chance.randint(1, len(ranks))):
                planned.variants[rank] = variant

    def _readiness(self, phases: dict[int, int]) -> int:
        """Return the phase after whose submissions an operation can be complete."""
        if self._ends == "leave" and len(phases) < self._program.size:
            return NEVER
        return max(phases.get(rank, last) for rank, last in enumerate(self._last))

    def _write(self, rank: int) -> None:
        acts, open_ = self._program.acts[rank], list[Planned]()
        for phase in range(self._last[rank] + 1):
            ends = phase == self._last[rank]
            begun = self._begun[phase][rank]
            open_ += [planned for planned in begun if rank in planned.variants]
            acts += self._submissions(rank, begun)
            waits = self._waits(open_, phase, ends)
            if ends:
                acts += [Act("deafen"), Act(self._ends)]
                waits.insert(self._chance.randint(0, len(waits)), Act("finish"))
            acts += waits
            done = {act.number for act in waits}
            open_ = [planned for planned in open_ if planned.number not in done]
            if not ends:
                for planned in self._run[phase]:
                    acts += [Act("attend")] * (rank in planned.attending)
                    acts.append(Act("run", planned.number))

    def _waits(self, open_: list[Planned], phase: int, ends: bool) -> list[Act]:
        """Choose what to wait for in this phase: all of it at the end of a section."""
        chance = self._chance
        chosen = [
            planned
            for planned in open_
            if ends
            or (planned.ready <= phase and (planned.kind == "step" or chance.random() < 0.6))
        ]
        chance.shuffle(chosen)
        return [Act(self._way_to_wait(planned, phase), planned.number) for planned in chosen]

    def _way_to_wait(self, planned: Planned, phase: int) -> str:
        # The next step of a plan begins when this one is done.
        may = planned.ready <= phase and planned.kind != "step"
        return "wait_beside" if may and self._chance.random() < 0.2 else "wait"

    def _submissions(self, rank: int, begun: list[Planned]) -> list[Act]:
        """Put what a rank submits in an order of its own, with other things in between."""
        acts: list[Act] = []
        chance = self._chance
        for planned in begun:
            if planned.kind != "step":
                kind = chance.choice(("submit", "submit", "hurry"))
                acts.insert(chance.randint(0, len(acts)), Act(kind, planned.number))
                continue
            place = 0
            for _ in range(planned.filled[rank]):
                place = chance.randint(place, len(acts)) + 1
                acts.insert(place - 1, Act("fill", planned.number))
        for kind in ("listen", "deafen", "poll", "poll", "rest", "rest"):
            if chance.random() < 0.15:
                acts.insert(chance.randint(0, len(acts)), Act(kind))
        return acts


Array = npt.NDArray[np.generic]
Value = list[list[float]]


@dataclass
class Made:
    operation: Operation
    read: Callable[[Any], Value]
    step: GradientStep | None = None
    repeat: Callable[[], Operation] | None = None  # makes it as a later call by a plan does


def data(planned: Planned, rank: int, part: int, count: int) -> Array:
    places = np.arange(count) * 3 + planned.number * 7 + rank * 11 + part * 5
    return ((places % 17) - 8).astype(planned.dtype.numpy)


def rows(planned: Planned, rank: int, other: int = 0) -> int:
    return (planned.number + rank + other) % 3


def make(planned: Planned, rank: int, size: int, name_of: Callable[[str, str], str]) -> Made:
    variant = planned.variants.get(rank)
    kind = "barrier" if variant == BARRIER else planned.kind
    name, longer = name_of(kind, planned.name), int(variant == OTHER)
    counts = [count + longer for count in planned.counts]
    arrays = [data(planned, rank, part, count) for part, count in enumerate(counts)]
    match kind:
        case "allreduce":
            return _allreduce(planned, rank, name, arrays)
        case "broadcast":
            array, root = arrays[0], planned.number % size
            operation = broadcast(Buffer.from_array(array), array.shape, root, name, root)
            return Made(operation, lambda _: [array.tolist()])
        case "allgather":
            shape = rows(planned, rank), counts[0]
            own = Buffer.from_array(data(planned, rank, 0, shape[0] * shape[1]))
            gather = allgather([own], [shape], name)
            return Made(gather, lambda result: [result[0][0].array().tolist(), result[0][1]])
        case "split":
            return Made(split(planned.members), _read_split)
        case "memory":
            return Made(allocate(64 * counts[0], name), lambda memory: [[memory.size]])
        case "step":
            return _step(planned, rank, name, predivide=1.0 + longer)
    return Made(Work(Request("barrier", name)), lambda _: [])


def _allreduce(planned: Planned, rank: int, name: str, arrays: list[Array]) -> Made:
    buffers = [Buffer.from_array(array) for array in arrays]
    shapes = [array.shape for array in arrays]
    operation = Allreduce(buffers, shapes, planned.op, name, planned.prescale)

    def repeat() -> Operation:
        plan = AllreducePlan(buffers, shapes, planned.op, name, planned.prescale, 1.0)
        sources = arrays if rank % 2 else [array.copy() for array in arrays]
        return PlannedAllreduce(plan, name, sources, arrays, lambda array: int(array.ctypes.data))

    return Made(operation, lambda _: [array.tolist() for array in arrays], repeat=repeat)


def _read_split(communicator: Any) -> Value:
    if communicator is None:
        return []
    communicator.close()
    return [[communicator.rank, communicator.size]]


def _step(planned: Planned, rank: int, name: str, predivide: float) -> Made:
    arrays = [
        data(planned, rank, part, count).astype(np.float64)
        for part, count in enumerate(planned.counts)
    ]
    buffers = [Buffer.from_array(array) for array in arrays]
    numbers = np.array([planned.number, rank + 1], np.int32)
    exchange = allreduce.AllreduceExchange(planned.op, predivide=predivide)
    step = GradientStep(buffers, Buffer.from_array(numbers), exchange)
    request = step_request(name, "digest", buffers, numbers.size, exchange)
    step.submitted_with(request, OwnStep(planned.weights.get(rank)))
    return Made(step, lambda _: [*(a.tolist() for a in arrays), numbers.tolist()], step)
