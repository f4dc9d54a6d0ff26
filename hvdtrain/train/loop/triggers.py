"""Triggers of a run: which actions are due after which steps and epochs, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.train.options import TrainOptions
from hvdtrain.train.options.declare import Interval

# Names of the timers that run on rank 0's clock.
EVALUATE, SAVE = "evaluate", "save"

# Defaults if pausing costs nothing; Keras starts another `fit` after each pause.
_LOG_STEPS, _WATCH_STEPS = 50, 100


@dataclass(frozen=True)
class Triggers:
    """When a run pauses to log, compare the ranks, evaluate or save."""

    log_steps: int
    watch_steps: int
    watch_epochs: bool
    evaluate: Interval
    save: Interval

    @classmethod
    def of(cls, options: TrainOptions) -> Triggers:
        """Return the triggers that the options ask for."""
        pausing_is_free = options.framework == "torch"
        log = _LOG_STEPS if pausing_is_free else 0
        watch = _WATCH_STEPS if pausing_is_free else 0
        return cls(
            log if options.log_every is None else options.log_every,
            watch if options.watch_every is None else options.watch_every,
            options.watch_every is None and not pausing_is_free,
            Interval.parse(options.evaluate_every, "--evaluate-every"),
            Interval.parse(options.checkpoint_every, "--checkpoint-every"),
        )

    @property
    def timers(self) -> dict[str, float]:
        """The actions that go by the clock: seconds by name of the timer."""
        everies = {EVALUATE: self.evaluate, SAVE: self.save}
        return {name: e.seconds for name, e in everies.items() if e.seconds is not None}

    def pauses(self, step: int) -> bool:
        """Return whether anything is due after this many steps."""
        return (
            self.logs(step)
            or self.watches(step, False)
            or self.evaluate.after_step(step)
            or self.save.after_step(step)
        )

    def logs(self, step: int) -> bool:
        """Return whether a line of steps.jsonl is due after this many steps."""
        return self.log_steps > 0 and step % self.log_steps == 0

    def watches(self, step: int, whole: bool) -> bool:
        """Return whether the ranks' weights are to be compared."""
        every = self.watch_steps
        return (every > 0 and step % every == 0) or (whole and self.watch_epochs)
