"""Saves of callbacks in the middle of an epoch, as all ranks know of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import keras

from hvdtrain.keras.callbacks.rank_zero import SharedBackup


@dataclass
class SaveSchedule:
    """The batches after which a callback saves, counted as ModelCheckpoint does."""

    every: int
    seen: int
    last: int | None

    def saves_after(self, batch: int) -> bool:
        """Count the batches up to this one; return whether the callback saves after it."""
        begins = self.last is None or batch <= self.last
        self.seen += batch + 1 if begins or self.last is None else batch - self.last
        self.last = batch
        if self.seen < self.every:
            return False
        self.seen = 0
        return True


def save_schedules(callbacks: Sequence[keras.callbacks.Callback]) -> list[SaveSchedule]:
    """Return the schedules of those callbacks that save after batches."""
    inner = [each.backup if isinstance(each, SharedBackup) else each for each in callbacks]
    kinds = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)
    return [
        SaveSchedule(each.save_freq, each._batches_seen_since_last_saving, each._last_batch_seen)
        for each in inner
        if isinstance(each, kinds) and isinstance(each.save_freq, int)
    ]
