"""What is to be done after which steps and epochs; the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.train.options import TrainOptions
from hvdtrain.train.options.interval import Interval

__all__ = ["EVALUATE", "SAVE", "Triggers"]

# What may go by rank 0's clock; names of timers.
EVALUATE, SAVE = "evaluate", "save"

# Defaults where pausing costs nothing; Keras begins another `fit` after each pause.
_LOG_STEPS, _WATCH_STEPS = 50, 100


@dataclass(frozen=True)
class Triggers:
    """When a run pauses.

    Attributes:
        log_steps: steps from one line of steps.jsonl to the next; 0: none.
        watch_steps: steps from one comparison of the ranks' weights to the next; 0: none.
        watch_epochs: compare them after each epoch.
        evaluate: how often to evaluate.
        save: how often to write a checkpoint.
    """

    log_steps: int
    watch_steps: int
    watch_epochs: bool
    evaluate: Interval
    save: Interval

    @classmethod
    def of(cls, options: TrainOptions) -> Triggers:
        """Return what a person has asked for."""
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
        """What goes by the clock: names, and seconds."""
        everies = {EVALUATE: self.evaluate, SAVE: self.save}
        return {name: e.seconds for name, e in everies.items() if e.seconds is not None}

    def pauses(self, step: int) -> bool:
        """Return whether anything is to be done after so many steps."""
        return (
            self.logs(step)
            or self.watches(step, False)
            or self.evaluate.after_step(step)
            or self.save.after_step(step)
        )

    def logs(self, step: int) -> bool:
        """Return whether a line of steps.jsonl is due."""
        return self.log_steps > 0 and step % self.log_steps == 0

    def watches(self, step: int, whole: bool) -> bool:
        """Return whether ranks are to be compared; `whole`: an epoch has just ended."""
        every = self.watch_steps
        return (every > 0 and step % every == 0) or (whole and self.watch_epochs)
