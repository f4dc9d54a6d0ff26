"""Predictions as lines for people (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.core.gradients.bucket_size import size_text
from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.core.prediction.costs import Measured, Prediction


def prediction_lines(
    measured: Measured, found: Sequence[Prediction], now_seconds: float | None
) -> list[str]:
    """Return a table of predictions."""
    link = measured.network
    now = "" if now_seconds is None else f"; a step takes {_milliseconds(now_seconds)} now"
    rows = [("", "sent by a node", "step")]
    rows += [
        (_methods(measured, each), size_text(round(each.sent_bytes)), _milliseconds(each.seconds))
        for each in found
    ]
    width = max(len(name) for name, _, _ in rows)
    return [
        f"between {measured.nodes} nodes an all-reduce starts in {1e6 * link.latency_seconds:.0f} "
        f"us and runs at {link.bytes_per_second / 1e9:.3g} GB/s{now}; predictions:",
        *(f"  {name:{width}}  {sent:>14}  {step:>9}" for name, sent, step in rows),
    ]


def choice_line(names: Sequence[str], plan: BucketPlan, chosen: Sequence[int]) -> str:
    """Return what was chosen."""
    parts = []
    total = sum(spec.count for spec in plan.specs)
    for number in sorted(set(chosen)):
        own = [spec.count for spec, own in zip(plan.specs, chosen, strict=True) if own == number]
        share = f"{100 * sum(own) / total:.1f} % of the elements"
        gradients = f"{len(own)} gradient{'s' * (len(own) != 1)}"
        parts.append(f"{names[number]} for {gradients} with {share}")
    return f"chosen: {', '.join(parts)}" if len(parts) > 1 else f"chosen: {names[chosen[0]]}"


def outcome_line(seconds: float, predicted: float, before: float | None) -> str:
    """Return what really happened.

    Args:
        seconds: measured time of a step.
    """
    average = "" if before is None else f", {_milliseconds(before)} with the average"
    return f"a step takes {_milliseconds(seconds)}, predicted {_milliseconds(predicted)}{average}"


def _methods(measured: Measured, found: Prediction) -> str:
    names = [measured.methods[number].name for number in sorted(set(found.choice), reverse=True)]
    return " and ".join(names)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
