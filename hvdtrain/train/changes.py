"""What the results say of ranks that were lost or have joined, by the recovery of the others."""

from __future__ import annotations

from collections.abc import Collection

from hvdtrain.core.context import Recovery
from hvdtrain.train.records.changes import RanksJoined, RanksLost
from hvdtrain.train.setup import TrainingSetup


def lost(
    recovery: Recovery,
    leaving: Collection[int],
    setup: TrainingSetup,
    seconds: float,
    reached: int | None,
) -> list[RanksLost]:
    """Return the records of ranks that were lost, first of those that had left by request.

    Args:
        seconds: time from the notice until now.
    """
    plan, progress = setup.step_plan, setup.start.progress
    left = tuple(rank for rank in recovery.lost if rank in leaving)
    ended = tuple(rank for rank in recovery.lost if rank not in leaving)
    groups = (left, recovery.size_before - len(left), True), (ended, recovery.left, False)
    return [
        RanksLost(
            step=progress.step,
            epoch=progress.epoch + progress.done / plan.samples,
            trained_seconds=progress.total_seconds,
            lost=ranks,
            ranks=remaining,
            seconds=seconds,
            global_batch_size=plan.global_batch_size,
            scaled_lr=plan.target_lr,
            left=by_request,
            again=0 if reached is None else max(reached - progress.step, 0),
        )
        for ranks, remaining, by_request in groups
        if ranks
    ]


def joined(recovery: Recovery, setup: TrainingSetup, seconds: float) -> list[RanksJoined]:
    """Return the record of ranks that have joined, if any have.

    Args:
        seconds: time from the last step of the others until now.
    """
    plan, progress = setup.step_plan, setup.start.progress
    if not recovery.joined:
        return []
    return [
        RanksJoined(
            step=progress.step,
            epoch=progress.epoch + progress.done / plan.samples,
            trained_seconds=progress.total_seconds,
            joined=recovery.joined,
            ranks=recovery.size,
            seconds=seconds,
            start_seconds=recovery.start_seconds,
            global_batch_size=plan.global_batch_size,
            scaled_lr=plan.target_lr,
        )
    ]
