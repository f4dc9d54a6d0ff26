"""What becomes of a step whose gradient is not finite: an error, or a warning."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from hvdtrain.collective import collective
from hvdtrain.core.objects import allgather_object
from hvdtrain.errors import TrainingError
from hvdtrain.train.torch.non_finite import ADVICE, Loss, left_out_text, non_finite_cause


class NonFinitePolicy:
    """Stops the run, or warns of steps and updates that are left out, as --non-finite asks for."""

    def __init__(self, action: str, rank: int) -> None:
        self._stops, self._rank = action == "stop", rank
        self._left_out = 0

    @collective
    def handle(self, step: int, model: torch.nn.Module, losses: Iterable[Loss]) -> None:
        """Find what is not finite, and raise an error or warn."""
        self._stop_or_warn(non_finite_cause(step, model, losses), "; the step is left out")

    def count_left_out(self, skipped: bool) -> None:
        """Count an update of this rank alone, if it was left out."""
        self._left_out += skipped

    @collective
    def report_left_out(self, step: int) -> None:
        """Report the updates that ranks have left out since the last call."""
        text = left_out_text(step, allgather_object(self._left_out, name="skips"))
        self._left_out = 0
        if text:
            self._stop_or_warn(text, "")

    def _stop_or_warn(self, text: str, consequence: str) -> None:
        if self._stops:
            raise TrainingError(f"{text}. {ADVICE}")
        if self._rank == 0:
            print(f"hvdtrain: {text}{consequence}", file=sys.stderr, flush=True)
