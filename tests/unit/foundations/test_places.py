"""What members tell one another of the devices of their tensors."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.operation import Operation, unpacked
from hvdtrain.core.allreduce import Allreduce
from hvdtrain.core.gathers import allgather, alltoall, broadcast, reducescatter
from hvdtrain.core.gradients.exchange import AllreduceExchange as Average
from hvdtrain.core.gradients.step import GradientStep
from hvdtrain.core.membership import answer_with_zeros
from hvdtrain.engines.local import LocalCommunicator
from hvdtrain.streams import Mark, Streams
from hvdtrain.types import DType, ReduceOp

MAKERS: dict[str, Callable[[Buffer], Operation]] = {
    "allreduce": lambda buffer: Allreduce([buffer], [(4,)], ReduceOp.SUM, "x"),
    "broadcast": lambda buffer: broadcast(buffer, (4,), 0, "x", 0),
    "allgather": lambda buffer: allgather([buffer], [(4,)], "x"),
    "alltoall": lambda buffer: alltoall(buffer, (4,), [4], "x"),
    "reducescatter": lambda buffer: reducescatter([buffer], [(4,)], ReduceOp.SUM, "x"),
}


def of(device: str) -> Buffer:
    """Return a buffer on a device; "meta" is one whose memory nobody can look at."""
    return Buffer.of(torch.zeros(4, device=device))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_members_with_tensors_on_different_devices_are_told_apart(
    make: Callable[[Buffer], Operation],
) -> None:
    here, there = make(of("cpu")).request, make(of("meta")).request
    assert here.ballot != there.ballot
    assert "device" not in str(here)
    assert str(there).endswith("device meta)")


class _Copying(Streams):
    """A copy into memory of the host is under way until it is waited for."""

    def __init__(self, memory: np.ndarray[tuple[int], np.dtype[np.float32]]) -> None:
        self._memory, self._arrived = memory, False

    def settle(self, mark: Mark) -> None:
        if not self._arrived:
            self._memory[:], self._arrived = 1, True


def test_a_step_that_is_abandoned_brings_zeros_whatever_is_being_copied() -> None:
    memory = np.full(4, 2, np.float32)
    numbers = Buffer.of(np.zeros(0, np.int32))
    copying = _Copying(memory)
    step = GradientStep([Buffer.of(memory)], numbers, Average(), None, [copying])
    step.abandon()
    copying.settle(None)
    assert step.all_launched
    assert memory.tolist() == [0.0] * 4


@pytest.mark.parametrize("devices", [["meta"], ["cpu", "meta"], ["cpu"]])
def test_a_joined_rank_answers_with_zeros_on_the_device_of_the_others(
    devices: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reduced = []
    communicator = LocalCommunicator()
    monkeypatch.setattr(communicator, "allreduce", lambda buffer, *_: reduced.append(buffer))
    asked = Allreduce([of(device) for device in devices], [(4,)] * len(devices), ReduceOp.SUM, "x")
    answer_with_zeros(unpacked(asked.request.packed)).execute(communicator)
    assert [(b.device, b.dtype, b.count) for b in reduced] == [
        (device, DType.FLOAT32, 4) for device in devices
    ]
    assert all(b.device != "cpu" or not b.array().any() for b in reduced)
