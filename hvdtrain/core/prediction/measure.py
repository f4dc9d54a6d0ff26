"""Measurements for a prediction, on which all ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.gradients.bucket_size import AllreduceCost, fit_cost, measure_allreduces
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import Exchange
from hvdtrain.core.gradients.plan import BucketPlan, ParameterSpec
from hvdtrain.core.prediction.costs import GradientCost, Measured, Method, as_in_steps
from hvdtrain.core.prediction.load import core_share
from hvdtrain.core.prediction.rehearsal import Rehearsed, rehearse, small
from hvdtrain.core.prediction.step_times import StepTimes
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import DType, ReduceOp

# Sizes of all-reduces, calls of each, and the time that the larger sizes must not exceed.
_SIZES_BYTES, _CALLS, _BUDGET_SECONDS = (4 << 10, 1 << 20, 4 << 20), 5, 1.0
# Other programs may disturb a measurement so much that times do not grow with size.
_TRIES = 3

# Type and device of a gradient's bucket.
Place = tuple[DType, str]
# Parameters of equal shape cost the same.
_Shape = tuple[Place, tuple[int, ...], tuple[int, ...]]

_NOTHING = AllreduceCost(0.0, float("inf"))
_IDLE = Rehearsed(0.0, 0.0, 0)
_TOO_NOISY = AllreduceCost(float("inf"), float("inf"))


def place_of(spec: ParameterSpec) -> Place:
    """Return the type and device of the gradient of a parameter."""
    return spec.dtype, spec.device


@dataclass(frozen=True)
class Measurement:
    """A measurement that all ranks carry out together."""

    exchanges: Mapping[str, Exchange]
    plan: BucketPlan
    memory: Mapping[Place, Buffer]
    times: StepTimes
    threads: int

    @collective
    def run(self, communicators: Communicators) -> Measured:
        """Measure the links and rehearse the exchanges; return the slowest of all."""
        network = communicators.network
        nodes = 0 if network is None else network.size
        links = [_link(network), _link(communicators.node)]
        shapes = list(dict.fromkeys(map(_shape, self.plan.specs)))
        meet = communicators.all_ranks.barrier
        rehearsed = [
            self._rehearse(exchange, shapes, nodes, meet) for exchange in self.exchanges.values()
        ]
        numbers = [
            float(nodes),
            self._core_share(meet),
            self.times.median_seconds(),
            *(number for link in links for number in (link.latency_seconds, _slowness(link))),
            *self.times.ready_seconds(),
            # The least of all: other ranks wait for the last one.
            *(-seconds for seconds in self.times.reduced_seconds()),
            *(
                number
                for of_method in rehearsed
                for each in of_method
                for number in (each.seconds, each.nbytes, float(each.calls))
            ),
        ]
        slowest = np.array(numbers, np.float64)
        communicators.all_ranks.allreduce(Buffer.from_array(slowest), ReduceOp.MAX)
        return self._measured(slowest.tolist(), shapes, communicators.owners)

    def _core_share(self, meet: Callable[[], None]) -> float:
        """Return the share c of the cost model; a device computes one thing at a time."""
        on_host = all(device == "cpu" for _, device in self.memory)
        return core_share(self.threads, meet) if on_host else 1.0

    @collective
    def _rehearse(
        self,
        exchange: Exchange,
        shapes: Sequence[_Shape],
        nodes: int,
        meet: Callable[[], None],
    ) -> list[Rehearsed]:
        """Rehearse an exchange with a small parameter, and with one of each shape.

        All ranks that share the network compute at the same time, as in a step.
        """
        specs = {_shape(spec): spec for spec in self.plan.specs}
        found = []
        for spec in (small(self.plan.specs[0]), *(specs[shape] for shape in shapes)):
            meet()
            memory = self.memory[place_of(spec)]
            found.append(rehearse(exchange, spec, memory, nodes) if nodes else _IDLE)
        return found

    def _measured(
        self, numbers: Sequence[float], shapes: Sequence[_Shape], owners: int
    ) -> Measured:
        """Return the numbers that all ranks have agreed on in their places."""
        nodes, share, step_seconds, *links = numbers[:7]
        ready, reduced, rest = _split(numbers[7:], len(self.plan.buckets))
        costs = np.array(rest).reshape(len(self.exchanges), 1 + len(shapes), 3)
        at = {shape: 1 + number for number, shape in enumerate(shapes)}
        methods = []
        for name, cost in zip(self.exchanges, costs.tolist(), strict=True):
            start = cost[0][0]
            of_shapes = [GradientCost(max(0.0, each[0] - start), each[1]) for each in cost]
            gradients = tuple(of_shapes[at[_shape(spec)]] for spec in self.plan.specs)
            methods.append(Method(name, max(each[2] for each in cost[1:]), start, gradients))
        measured = Measured(
            int(nodes),
            owners,
            AllreduceCost(links[0], _inverse(links[1])),
            AllreduceCost(links[2], _inverse(links[3])),
            tuple(ready),
            tuple(methods),
            share,
        )
        if not measured.valid:
            return measured
        return as_in_steps(measured, self.plan, -sum(reduced), step_seconds)


def _split(numbers: Sequence[float], count: int) -> tuple[Sequence[float], ...]:
    """Return the first numbers, as many others after them, and the rest."""
    return numbers[:count], numbers[count : 2 * count], numbers[2 * count :]


def _shape(spec: ParameterSpec) -> _Shape:
    return place_of(spec), spec.shape, spec.strides


@collective
def _link(communicator: Communicator | None) -> AllreduceCost:
    """Measure all-reduces."""
    if communicator is None or communicator.size == 1:
        return _NOTHING
    for _ in range(_TRIES):  # as many on all members, who have the same times
        points = measure_allreduces(communicator, _SIZES_BYTES, _CALLS, _BUDGET_SECONDS)
        with suppress(ValueError):
            return fit_cost(points)
    return _TOO_NOISY


def _slowness(link: AllreduceCost) -> float:
    return 1 / link.bytes_per_second


def _inverse(slowness: float) -> float:
    return 1 / slowness if slowness else float("inf")
