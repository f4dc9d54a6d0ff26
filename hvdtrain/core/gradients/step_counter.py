"""The count of the steps that a rank takes by itself between exchanges of weights."""

from __future__ import annotations

from hvdtrain.core.gradients.step_info import LocalSteps, StepInfo


class StepCounter:
    """Counts the steps of this rank, and their samples, since weights were exchanged."""

    def __init__(self) -> None:
        self.steps = 0
        self.samples_per_step: float | None = None
        self.begin_anew()

    def begin_anew(self) -> None:
        """Note that the weights of all ranks are equal now."""
        self.begun = False
        self._since_exchange = self.local_steps = 0
        self.samples = 0.0

    @property
    def synchronized(self) -> bool:
        """Whether this rank has taken no step since the weights of all were equal."""
        return self.local_steps == 0

    def check_synchronized(self, caller: str) -> None:
        """Check that the weights of all ranks are equal."""
        if not self.synchronized:
            raise RuntimeError(
                "the ranks' weights differ until their next exchange: call flush() before "
                f"{caller}()"
            )

    def count(self, samples: float | None, rate: float | None) -> LocalSteps:
        """Count a step; return what tells an exchange whether it is due."""
        self.steps += 1
        self._since_exchange += 1
        self.local_steps += 1
        self.samples += 1.0 if samples is None else samples
        return LocalSteps(self._since_exchange, self.samples_per_step, self.steps, rate)

    def end_exchange(self, info: StepInfo, partial: bool, counts_samples: bool) -> None:
        """Note that weights were exchanged."""
        if counts_samples and info.total:
            # Without any step the samples are those of the first one.
            self.samples_per_step = info.total * info.size / (info.local_steps or info.size)
        self._since_exchange = 0
        if info.flush or not partial:
            self.begin_anew()
