"""Turns of many training steps, which contenders take in slices between those of the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from hvdtrain_bench.harness.ranks import Ranks

_FIRST_STEPS = 2


@dataclass(frozen=True)
class Stepper:
    """Something whose steps are timed.

    Attributes:
        steps: number of steps of a turn.
        prepare: called once, before the first step.
        check: raises WrongResultError unless the ranks agree.
    """

    name: str
    steps: int
    prepare: Callable[[], None]
    step: Callable[[], None]
    check: Callable[[], None]


def take_slices(
    ranks: Ranks,
    steppers: Sequence[Stepper],
    repeats: int,
    slice_steps: int,
    run: Callable[[str, int, Callable[[], None]], None],
) -> dict[str, list[float]]:
    """Return the mean time of a step in each turn (collective).

    In each repeat every contender takes one turn, in slices of a few steps. The slices of all
    contenders alternate at random, so that turns of very different lengths see the same machine.

    Args:
        run: takes a number of steps of a contender; called with its name, that number, and step.
    """
    for stepper in steppers:
        stepper.prepare()
        for _ in range(_FIRST_STEPS):
            stepper.step()
        stepper.check()  # also begins a new period
    found: dict[str, list[float]] = {stepper.name: [] for stepper in steppers}
    for repeat in range(repeats):
        seconds = dict.fromkeys(found, 0.0)
        for stepper, steps in _slices(steppers, slice_steps, Random(repeat)):
            ranks.rest()
            ranks.meet()
            began = time.perf_counter()
            run(stepper.name, steps, stepper.step)
            seconds[stepper.name] += ranks.largest(time.perf_counter() - began)
        for stepper in steppers:
            stepper.check()
            found[stepper.name].append(seconds[stepper.name] / stepper.steps)
    return found


def _slices(
    steppers: Sequence[Stepper], slice_steps: int, random: Random
) -> list[tuple[Stepper, int]]:
    """Return contenders with numbers of steps, in random order."""
    slices = [
        (stepper, min(slice_steps, stepper.steps - start))
        for stepper in steppers
        for start in range(0, stepper.steps, slice_steps)
    ]
    random.shuffle(slices)
    return slices
