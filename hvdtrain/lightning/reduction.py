"""When the gradients of an optimizer are reduced in Lightning's loops."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from hvdtrain.collective import collective
from hvdtrain.torch import DistributedOptimizer

_NEVER = 1 << 30


class Reduction:
    """Reduces gradients at the end of a backward pass, before hooks and clipping see them."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer
        self.whole = True
        self._held = 0
        self._reduced = False

    @property
    def _waits(self) -> bool:
        """Whether the step itself reduces, gradients or weights."""
        return self._optimizer.exchanges_weights or (self._optimizer.sharded and not self.whole)

    def begin(self, blocked: bool) -> None:
        """Prepare for a backward pass."""
        if not self._optimizer.exchanges_weights:
            passes = _NEVER if blocked else self._held + 1
            self._optimizer.set_backward_passes_per_step(passes)

    @collective
    def end(self, blocked: bool, always: bool) -> None:
        """Reduce the gradients of a backward pass (collective, unless they are accumulated)."""
        pending = self._optimizer.pending
        if pending:
            self._reduced = False
        if blocked:
            self._held += pending
        elif (pending or always) and not self._waits:
            self._reduce()

    @collective
    def complete(self) -> None:
        """Reduce what no backward pass has, before a step."""
        if not self._waits and (self._optimizer.pending or not self._reduced):
            self._reduce()

    def _reduce(self) -> None:
        self._optimizer.synchronize()
        self._reduced = True

    def stepping(self) -> AbstractContextManager[None]:
        """Return the context of a step, which need not reduce again."""
        return nullcontext() if self._waits else self._optimizer.skip_synchronize()

    def forget(self) -> None:
        """Begin anew after a step."""
        self._held = 0
        self._reduced = False
