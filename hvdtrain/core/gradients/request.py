"""The request of a gradient step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.request import Request
from hvdtrain.core.collectives.devices import device_details, device_types
from hvdtrain.core.gradients.exchange import Exchange, Kind
from hvdtrain.core.gradients.plan import STEP
from hvdtrain.types import DType


def step_request(
    name: str,
    digest: str,
    buffers: Sequence[Buffer],
    numbers: int,
    exchange: Exchange,
    step: int | None = None,
) -> Request:
    """Return the request of a step."""
    devices = device_types(buffers)
    details = (
        ("exchange", exchange.spec),
        ("plan", digest),
        *device_details(devices),
        *(() if step is None else (("step", str(step)),)),
    )
    kinds = (*((buffer.count, buffer.dtype) for buffer in buffers), (numbers, DType.INT32))
    zeros = exchange.zeros(kinds)
    if zeros is None:
        return Request(STEP, name, details, None, _instead_of_join(exchange))
    return Request(STEP, name, details, replace(zeros, devices=(*devices, "cpu")))


def _instead_of_join(exchange: Exchange) -> str:
    what = (
        "call flush()" if exchange.kind is Kind.WEIGHTS else "take its steps with sample_weight=0"
    )
    return (
        f"exchange {exchange.spec!r} needs all ranks: let a rank without data {what} instead of "
        "join()"
    )
