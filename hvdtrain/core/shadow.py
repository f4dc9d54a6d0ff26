"""How a rank that has joined takes part in what the others still do: with zeros."""

from __future__ import annotations

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.core.collectives.allreduce import Allreduce
from hvdtrain.core.collectives.step import STEP, Step, StepState
from hvdtrain.core.operation import Operation
from hvdtrain.core.request import Request

__all__ = ["shadow"]


def shadow(request: Request) -> Operation:
    """Make the operation with which a joined rank answers another rank's request (local)."""
    zeros = request.zeros
    if zeros is None:
        raise ValueError(f"a joined rank cannot take part in {request}")
    buffers = [
        Buffer.from_array(np.zeros(count, dtype.numpy), dtype) for count, dtype in zeros.buffers
    ]
    if request.operation == STEP:
        *buckets, numbers = buffers
        state = StepState(
            buckets, numbers, zeros.op, weight=None, postscale=zeros.postscale, joined=True
        )
        state.launch_all()
        return Step(state, request)
    shapes = [(buffer.count,) for buffer in buffers]
    return Allreduce(buffers, shapes, zeros.op, request.name, zeros.prescale, zeros.postscale)
