"""Finding the origin of a gradient that is not finite, with torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hvdtrain.collective import collective
from hvdtrain.core.objects import allgather_object
from hvdtrain.errors import TrainingError
from hvdtrain.topology import format_ranks
from hvdtrain.train.options.config_file import counted

ADVICE = (
    "Lower --lr, lengthen --warmup-epochs, set --clip-norm, look at the samples of this step, or "
    "leave such steps out with --non-finite skip"
)

Loss = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class NonFiniteValue:
    """The first value that is not finite on one rank."""

    what: str = ""
    name: str = ""
    value: float = 0.0


@collective
def non_finite_cause(step: int, model: torch.nn.Module, losses: Iterable[Loss]) -> str:
    """Describe which ranks and parameters made this step's gradient not finite.

    The gradients are computed again, each rank's own, before they are reduced. They are discarded,
    and buffers are left unchanged.
    """
    return non_finite_text(step, allgather_object(_find(model, losses), "not finite"))


def non_finite_text(step: int, findings: Sequence[NonFiniteValue]) -> str:
    """Return the message about the values that are not finite."""
    ranks: dict[str, list[int]] = {}
    for rank, finding in enumerate(findings):
        if finding.what:
            ranks.setdefault(_description(finding), []).append(rank)
    parts = [f"{description} on {format_ranks(where)}" for description, where in ranks.items()]
    if not parts:
        parts = [
            "the gradient over all ranks is not finite, though each rank's own is: its sum or its "
            "norm is too large"
        ]
    return f"step {step}: {'; '.join(parts)}"


def left_out_text(step: int, counts: Sequence[int]) -> str:
    """Return the message about updates that ranks have left out; "" if there are none."""
    ranks = [rank for rank, count in enumerate(counts) if count]
    if not ranks:
        return ""
    return (
        f"until step {step}: {counted(sum(counts), 'update')} left out on {format_ranks(ranks)}, "
        "where the gradient of the rank was not finite"
    )


def _description(finding: NonFiniteValue) -> str:
    if finding.what == "loss":
        return f"the loss is {finding.value}"
    return f"the {finding.what} of {finding.name!r} is not finite"


def _find(model: torch.nn.Module, losses: Iterable[Loss]) -> NonFiniteValue:
    """Return the first value that is not finite: a weight, or a microbatch's loss or gradient.

    All losses are computed in any case: models may communicate in both passes.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    name = _first_non_finite(named)
    findings = [NonFiniteValue("weight", name)] if name else []
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        for loss_of in losses:
            loss = loss_of()
            gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            name = _first_non_finite(dict(zip(named, gradients, strict=True)))
            if not loss.isfinite().all():
                findings.append(NonFiniteValue("loss", value=loss.item()))
            elif name:
                findings.append(NonFiniteValue("gradient", name))
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)
    return findings[0] if findings else NonFiniteValue()


def _first_non_finite(tensors: Mapping[str, torch.Tensor | None]) -> str:
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.isfinite().all():
            return name
    return ""


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
