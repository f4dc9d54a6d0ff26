"""What ranks agree on before a step of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.request import Request
from hvdtrain.core.collectives.places import device_details, device_types
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
        name: of the plan, or of the user's.
        digest: of the plan.
        buffers: of the buckets.
        numbers: how many are added up at the end.
        exchange: what is done with the buckets.
        step: how many steps the program has ended before, where that is counted.
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
