"""Where a gradient that is not finite came from, with torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hvdtrain.core.objects import allgather_object
from hvdtrain.train.loop.replica_check import ranks_text

__all__ = ["ADVICE", "non_finite_cause", "non_finite_text"]

ADVICE = (
    "Lower --lr, lengthen --warmup-epochs, set --clip-norm, look at the samples of this step, or "
    "leave such steps out with --non-finite skip"
)

Loss = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class NonFiniteValue:
    """What is not finite on one rank.

    Attributes:
        what: "weight", "loss" or "gradient"; "" where all is finite.
        name: of the parameter; "" for a loss.
        value: the loss.
    """

    what: str = ""
    name: str = ""
    value: float = 0.0


def non_finite_cause(step: int, model: torch.nn.Module, losses: Iterable[Loss]) -> str:
    """Say on which ranks, in which parameter, this step's gradient is not finite (collective).

    The gradients are computed once more, each rank's own, before they are reduced; they go
    nowhere, and buffers are left as they were.

    Args:
        step: the number that people are told.
        model: with the weights that the step began with.
        losses: for each part of this rank, returns its loss again: of the same samples, with the
            same random numbers, in the same types.

    Returns:
        The same text on every rank; ADVICE says what to do.
    """
    return non_finite_text(step, allgather_object(_find(model, losses), "not finite"))


def non_finite_text(step: int, findings: Sequence[NonFiniteValue]) -> str:
    """Return the message about findings, by rank."""
    ranks: dict[str, list[int]] = {}
    for rank, finding in enumerate(findings):
        if finding.what:
            ranks.setdefault(_description(finding), []).append(rank)
    parts = [f"{description} on {ranks_text(where)}" for description, where in ranks.items()]
    if not parts:
        parts = [
            "the gradient over all ranks is not finite, though each rank's own is: its sum or its "
            "norm is too large"
        ]
    return f"step {step}: {'; '.join(parts)}"


def _description(finding: NonFiniteValue) -> str:
    if finding.what == "loss":
        return f"the loss is {finding.value}"
    return f"the {finding.what} of {finding.name!r} is not finite"


def _find(model: torch.nn.Module, losses: Iterable[Loss]) -> NonFiniteValue:
    """Return the first thing that is not finite: a weight, or a part's loss or gradient.

    All parts are computed whatever is found: models may communicate in both passes.
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
