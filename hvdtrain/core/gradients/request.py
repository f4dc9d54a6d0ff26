"""The request of a gradient step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.request import Request
from hvdtrain.core.collectives.devices import device_details, device_types
from hvdtrain.core.gradients.exchange import Exchange
from hvdtrain.core.gradients.plan import STEP
from hvdtrain.types import DType

__all__ = ["step_request"]


def step_request(
    name: str,
    digest: str,
    buffers: Sequence[Buffer],
    numbers: int,
    exchange: Exchange,
    step: int | None = None,
) -> Request:
    """Return the request of a step.

    Args:
        name: name of the plan, or a name given by the user.
        digest: digest of the plan.
        buffers: memory of the buckets.
        numbers: number of integers that are summed at the end of the step.
        exchange: exchange of the buckets.
        step: number of steps that the program has completed; None if ranks need not agree on it.
    """
    devices = device_types(buffers)
    details = (
        ("exchange", exchange.spec),
        ("plan", digest),
        *device_details(devices),
        *(() if step is None else (("step", str(step)),)),
    )
    kinds = (*((buffer.count, buffer.dtype) for buffer in buffers), (numbers, DType.INT32))
    zeros = exchange.zeros(kinds)
    if zeros is not None:
        zeros = replace(zeros, devices=(*devices, "cpu"))
    return Request(STEP, name, details, zeros)
