"""Whether the program changes gradients between backward() and step() (all local)."""

from __future__ import annotations

from collections.abc import Iterable

from hvdtrain.torch.gradients.views import BucketViews

__all__ = ["GradientChanges"]


class GradientChanges:
    """Looks for changes before each backward pass of a step, and before the step.

    A backward pass itself writes into the buckets, so that changes have to be found before it does.
    """

    def __init__(self) -> None:
        self._backward_ended = False
        self._found: int | None = None

    def note(self, views: BucketViews) -> None:
        """Note what a backward pass has left."""
        views.note_versions()
        self._backward_ended = True

    def look(self, views: BucketViews, complete: Iterable[int], arriving: int) -> None:
        """Look for changes since note(), when the first gradient of another backward pass arrives.

        Args:
            views: gradients as views of the buckets.
            complete: parameters whose gradients were taken.
            arriving: parameter whose gradient autograd has accumulated now, perhaps in its bucket.
        """
        if self._backward_ended:
            self._backward_ended = False
            if self._found is None:
                self._found = views.changed(complete, arriving)

    def find(self, views: BucketViews, complete: Iterable[int]) -> int | None:
        """Return a parameter whose gradient has changed; None if none has.

        Args:
            views, complete: as for look().
        """
        return views.changed(complete) if self._found is None else self._found

    def forget(self) -> None:
        """Prepare for the next step."""
        self._backward_ended, self._found = False, None
