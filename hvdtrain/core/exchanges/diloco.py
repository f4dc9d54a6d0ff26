"""DiLoCo: an outer optimizer steps on what ranks have changed in many steps by themselves.

Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023, and
Streaming DiLoCo with Overlapping Communication, 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import cast

import numpy as np

from hvdtrain.arrays import Array, HostArray, copy, is_tensor, like_shape
from hvdtrain.collective import collective
from hvdtrain.core.exchanges.half import HalfExchange
from hvdtrain.core.exchanges.n_bit import NBitExchange
from hvdtrain.core.exchanges.parameter_state import ParameterState
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import (
    AllreduceExchange,
    Exchange,
    ExchangeState,
    FilledBucket,
    InnerState,
    Kind,
    LocalSteps,
    StepInfo,
    check_count,
    check_momentum,
    check_positive,
    parse_inner_state,
)
from hvdtrain.core.gradients.plan import BucketPlan

_NEXT = "next fragment"
# Parts of host arrays of which half a dozen fit into the cache of a core.
_PART_ELEMENTS = 1 << 15
# Averages of what ranks have changed, by the type of what crosses the network.
_AVERAGES: Mapping[str, Callable[[], Exchange]] = {
    "float32": AllreduceExchange,
    "bf16": HalfExchange,
    "int8": partial(NBitExchange, bits=8),
    "int4": partial(NBitExchange, bits=4),
}


class DiLoCo(Exchange):
    """SGD with Nesterov momentum on the ranks' mean change of the weights, a pseudo-gradient.

    Ranks take `steps` steps by themselves from common weights V. Then

        d = V - sum_r(c_r w_r) / sum_r(c_r)
        u = momentum u + d
        V = V - rate (d + momentum u)

    where c_r are the samples of rank r since the weights of all ranks were equal. With
    `fragments`, the parameters are divided into fragments of about equal size, and every
    steps / fragments steps one of them is exchanged: each is exchanged every `steps` steps.

    Args:
        steps: steps of each rank between two exchanges of a parameter.
        rate: learning rate of the outer optimizer.
        momentum: momentum of the outer optimizer.
        fragments: number of fragments.
        type: what crosses the network of d: "float32" for all of it, "bf16" for half types
            (HalfExchange), or "int8" or "int4" for 8 or 4 bits with error feedback (NBitExchange).
        state: what becomes of the state of each rank's optimizer after an exchange: "keep",
            "average" it as well, or "reset" it, as if the optimizer were new.

    Raises:
        TypeError: `steps` is no whole number.
        ValueError: an argument is out of range, or arguments exclude each other.
    """

    exactness = "Ranks drift apart between exchanges, from which an outer optimizer steps."
    kind = Kind.WEIGHTS

    def __init__(
        self,
        steps: int = 500,
        rate: float = 0.7,
        momentum: float = 0.9,
        fragments: int = 1,
        type: str = "float32",
        state: str = "keep",
    ) -> None:
        check_count("steps", steps)
        check_positive("rate", rate)
        check_momentum(momentum)
        if fragments < 1 or steps % fragments:
            raise ValueError(
                f"steps must be a multiple of fragments, got steps={steps} and "
                f"fragments={fragments}"
            )
        if type not in _AVERAGES:
            raise ValueError(f"type must be one of {', '.join(_AVERAGES)}, got {type}")
        self.inner_state = parse_inner_state(state)
        if fragments > 1 and self.inner_state is not InnerState.KEEP:
            raise ValueError(
                f"state={state} needs fragments=1, because an optimizer's state is not divided "
                f"into fragments, got fragments={fragments}"
            )
        self._average = _AVERAGES[type]()
        self.hierarchical = self._average.hierarchical
        self.checks_finite = self._average.checks_finite
        self._steps, self._rate, self._momentum = steps, rate, momentum
        self._fragments, self.partial = fragments, fragments > 1
        self.spec = (
            f"diloco:steps={steps},rate={float(rate)!r},momentum={float(momentum)!r},"
            f"fragments={fragments},type={type},state={state}"
        )
        self._start, self._velocity = ParameterState("start"), ParameterState("velocity")
        self._fragment_of: list[int] = []
        self._next = 0

    def prepare(self, plan: BucketPlan) -> None:
        self._average.prepare(plan)
        # In the order of the model, so that the parameters of a fragment lie side by side.
        sizes = np.array([spec.count * spec.dtype.itemsize for spec in plan.specs])
        middles = np.cumsum(sizes) - sizes / 2
        of_all = middles * self._fragments // max(1, sizes.sum())
        self._fragment_of = of_all.astype(int).tolist()

    def begin(self, bucket: FilledBucket) -> None:
        self._start.keep(bucket)

    def due(self, steps: LocalSteps) -> bool:
        return steps.number >= self._steps // self._fragments

    @collective
    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        if info.flush or not self.partial:
            self._step(bucket, info, communicators)
            return
        indices = enumerate(bucket.layout.parameters)
        for fragment, run in groupby(indices, lambda each: self._fragment_of[each[1]]):
            if fragment == self._next:
                numbers = [number for number, _ in run]
                self._step(bucket.section(numbers[0], numbers[-1]), info, communicators)

    @collective
    def _step(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        """Take a step of the outer optimizer on all parameters of a bucket."""
        for part in bucket.parts:
            start = self._start.get(part.name, part.array)
            for own, common in _parts(part.array, start):
                own[...] = common - own
        self._average.reduce(bucket, info, communicators)
        for part in bucket.parts:
            start = self._start.get(part.name, part.array)
            before = self._velocity.get(part.name, part.array)
            velocity = like_shape(before, before.shape)
            for d, u, old, common in _parts(part.array, velocity, before, start):
                u[...] = old * self._momentum
                u += d
                step = u * self._momentum
                step += d
                step *= self._rate
                d[...] = common - step
            self._velocity.put(part.name, velocity)
            if self.partial:
                self._start.put(part.name, copy(part.array))

    def end(self, info: StepInfo) -> None:
        self._average.end(info)
        self._velocity.end()
        self._start.end()
        if not info.flush:
            self._next = (self._next + 1) % self._fragments

    def state(self) -> ExchangeState:
        shared = {_NEXT: np.array(self._next), **self._velocity.arrays()}
        return ExchangeState(shared, self._average.state().own)

    def load(self, state: ExchangeState) -> None:
        if _NEXT not in state.shared:
            raise ValueError(f"exchange {self.spec!r} was given no {_NEXT}")
        self._next = int(state.shared[_NEXT])
        self._velocity.load(state.shared)
        self._average.load(ExchangeState(own=state.own))


def _parts(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Yield views of the same elements of each array, which in host memory fit into the cache."""
    hosts = [cast("HostArray", array) for array in arrays]
    if is_tensor(arrays[0]) or not all(host.flags.c_contiguous for host in hosts):
        yield arrays
        return
    flat = [array.reshape(-1) for array in arrays]
    for low in range(0, hosts[0].size, _PART_ELEMENTS):
        yield tuple(array[low : low + _PART_ELEMENTS] for array in flat)
