"""The position in an epoch: a number of samples, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.errors import UsageError

__all__ = ["Position"]


class Position:
    """An epoch, and how many of its samples all ranks together have used.

    It moves by advance() only, never by reading ahead, so that a position saved with the weights is
    the one that the weights have seen.

    Args:
        samples: samples of an epoch, of all ranks.
        batch_size: samples of all ranks per step.
        same: further numbers by name that must be the same when a state is loaded.

    Attributes:
        epoch: epoch, counted from 0.
        consumed: samples of this epoch that optimizer steps have used.

    Raises:
        ValueError: a number is less than 1.
    """

    def __init__(self, samples: int, batch_size: int, same: Mapping[str, int]) -> None:
        if samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.samples, self.batch_size = samples, batch_size
        self.epoch, self.consumed = 0, 0
        self._same = {"samples": samples, **same}

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch; if it is the current one, continue in it (local, on all ranks)."""
        if epoch != self.epoch:
            self.epoch, self.consumed = epoch, 0

    def advance(self) -> None:
        """Record that a global batch was used; after the last one the next epoch starts (local).

        Call it after each optimizer step, on all ranks.
        """
        self.consumed += self.batch_size
        if self.consumed >= self.samples:
            self.epoch, self.consumed = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint needs to resume here (local); the same on all ranks."""
        return {"epoch": self.epoch, "consumed": self.consumed, **self._same}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume where state_dict() was called, on any number of ranks (local, on all ranks).

        Args:
            state: result of state_dict().

        Raises:
            UsageError: the state belongs to other data, or to another order.
        """
        for name, value in self._same.items():
            if state.get(name) != value:
                raise UsageError(
                    f"the saved position is for {name} {state.get(name)}, but this run has {name} "
                    f"{value}: use the same, or start a new epoch"
                )
        self.epoch, self.consumed = state["epoch"], state["consumed"]
