"""What exchanges of weights need of Keras's backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.keras.tensors.types import Tensor


class WeightBackend(Protocol):
    """What exchanges of weights need of Keras's backend."""

    @collective
    def exchange_if(
        self,
        due: Callable[[list[HostArray]], bool],
        numbers: Sequence[Tensor],
        exchange: Callable[[list[HostArray]], list[HostArray]],
        weights: Sequence[Tensor],
    ) -> list[Tensor]:
        """Exchange weights if that is due, else copy nothing to the host (collective if due)."""

    def is_tracing(self) -> bool:
        """Return whether this function is called by one that is being traced (local)."""

    def wait_for_steps(self) -> None:
        """Wait until all steps that were started are done."""

    def outside_traces(self) -> AbstractContextManager[object]:
        """Return a context in which variables have values, also while a function is traced."""
