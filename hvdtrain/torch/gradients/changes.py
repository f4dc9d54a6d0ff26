"""Whether the program changes gradients between backward() and step() (all local)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hvdtrain.torch.gradients.views import BucketViews


class GradientChanges:
    """Looks for changes before each backward pass of a step, and before the step.

    A backward pass itself writes into the buckets, so that changes have to be found before it does.
    """

    def __init__(self) -> None:
        self._found: int | None = None
        self._backward_ended = False
        self._versions: list[int] = []  # of the memory of each bucket; none if nothing was noted
        self._elsewhere: dict[int, tuple[torch.Tensor, int]] = {}  # gradients outside the buckets

    def note(self, views: BucketViews) -> None:
        """Note what a backward pass has left."""
        self._backward_ended = True
        self._versions = [memory._version for memory in views.memory]
        self._elsewhere = {i: (view, view._version) for i, view in views.elsewhere().items()}

    @property
    def arriving(self) -> bool:
        """Whether gradients have arrived since note(), so that changes cannot be found."""
        return not self._backward_ended

    def look(self, views: BucketViews, complete: Iterable[int], arriving: int) -> None:
        """Look for changes since note() when another backward pass brings its first gradient."""
        if self._backward_ended:
            self._backward_ended = False
            if self._found is None:
                self._found = self._changed(views, complete, arriving)

    def find(self, views: BucketViews, complete: Iterable[int]) -> int | None:
        """Return a parameter whose gradient has changed; None if none has."""
        return self._changed(views, complete) if self._found is None else self._found

    def forget(self) -> None:
        """Prepare for the next step."""
        self._backward_ended, self._found = False, None
        self._versions, self._elsewhere = [], {}

    def _changed(
        self, views: BucketViews, complete: Iterable[int], arriving: int | None = None
    ) -> int | None:
        """Return a parameter whose gradient the program has changed since note().

        That is the first one of a bucket if it is not known which. No gradient of the bucket of
        `arriving` was taken before it arrived.
        """
        for index in complete:
            if views.is_replaced(index):
                return index
        for index, view in views.elsewhere().items():
            noted, at = self._elsewhere.get(index, (None, 0))
            if view is noted and view._version != at and index != arriving:
                return index
        if not self._versions:
            return None
        filling = arriving is not None and views.holds(arriving)
        for memory, at, bucket in zip(views.memory, self._versions, views.buckets, strict=True):
            if memory._version != at and not (filling and arriving in bucket.parameters):
                return bucket.parameters[0]
        return None
