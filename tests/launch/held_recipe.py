"""The recipe `digits`, held in the third epoch until a job of Slurm is told to stop, once."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from hvdtrain.data.sampling import Indices
from hvdtrain.train.loop.step_plan import StepPlan
from hvdtrain.train.recipes.torch_recipes import digits

recipe, batches = digits, StepPlan.batches


def held_batches(self: StepPlan, epoch: int, done: int = 0) -> Iterator[tuple[int, Indices]]:
    handler: Any = signal.getsignal(signal.SIGUSR1)  # a method of what notes the signal
    for step, batch in batches(self, epoch, done):
        while epoch == 2 and "SLURM_RESTART_COUNT" not in os.environ and not handler.__self__.asked:
            time.sleep(0.01)
        yield step, batch


StepPlan.batches = held_batches  # type: ignore[method-assign]
