"""Operations with which a joined rank contributes zeros to those of the other ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.request import Request, Zeros
from hvdtrain.core.collectives.allreduce import Allreduce
from hvdtrain.core.exchanges.adasum import AdasumExchange
from hvdtrain.core.exchanges.allreduce import AllreduceExchange
from hvdtrain.core.exchanges.half import HalfExchange
from hvdtrain.core.gradients.exchange import Exchange
from hvdtrain.core.gradients.plan import STEP
from hvdtrain.core.gradients.step import GradientStep
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import DType, ReduceOp


def answer_with_zeros(request: Request) -> Operation:
    """Return the operation with which a joined rank takes part in a request."""
    zeros = request.zeros
    if zeros is None:
        raise ValueError(f"a joined rank cannot take part in {request}")
    if any(device != "cpu" for device in zeros.devices):
        return _OnDevice(request, zeros)
    return _answer(request, zeros, [_on_host(count, dtype) for count, dtype in zeros.buffers])


class _OnDevice(Operation):
    """An operation with zeros on a device, which the engine chooses."""

    def __init__(self, request: Request, zeros: Zeros) -> None:
        super().__init__()
        self.request, self._zeros = request, zeros

    def execute(self, communicator: Communicator) -> object:
        kinds = zip(self._zeros.buffers, self._zeros.devices, strict=True)
        buffers = [
            _on_host(count, dtype)
            if device == "cpu"
            else _on_device(communicator, count, dtype, device)
            for (count, dtype), device in kinds
        ]
        return _answer(self.request, self._zeros, buffers).execute(communicator)


def _answer(request: Request, zeros: Zeros, buffers: Sequence[Buffer]) -> Operation:
    if request.operation == STEP:
        *buckets, numbers = buffers
        step = GradientStep(buckets, numbers, _exchange(zeros))
        step.request, step.joined = request, True
        step.launch_all()
        return step
    shapes = [(buffer.count,) for buffer in buffers]
    return Allreduce(buffers, shapes, zeros.op, request.name, zeros.prescale, zeros.postscale)


def _exchange(zeros: Zeros) -> Exchange:
    """Return the exchange of a step of the other ranks."""
    if zeros.op is ReduceOp.ADASUM:
        return AdasumExchange()
    return HalfExchange.answering(zeros) if zeros.half else AllreduceExchange.answering(zeros)


def _on_host(count: int, dtype: DType) -> Buffer:
    return Buffer.of(np.zeros(count, dtype.numpy), dtype)


def _on_device(communicator: Communicator, count: int, dtype: DType, device: str) -> Buffer:
    memory = Buffer.of(communicator.empty(count * dtype.itemsize, device)).view(dtype)
    memory.zero()
    return memory
