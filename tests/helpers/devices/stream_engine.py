"""An engine of one rank that records when it uses which memory; see stream_record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import memmove
from dataclasses import replace

import stream_record
from hidden_memory import DEVICE

from hvdtrain.buffer import Buffer
from hvdtrain.config import Config
from hvdtrain.core.collectives import allreduce
from hvdtrain.engines import registry
from hvdtrain.engines.communicator import EngineWorld
from hvdtrain.engines.local import LocalCommunicator
from hvdtrain.types import ReduceOp


class RecordingCommunicator(LocalCommunicator):
    """Uses memory of a device on the current stream, and that of the host at once."""

    def __init__(self, device: bool) -> None:
        devices = frozenset({"cpu", DEVICE} if device else {"cpu"})
        self._device = device
        # With a thread for each channel, as nccl and gloo have.
        self.capabilities = replace(
            LocalCommunicator.capabilities, devices=devices, concurrent=True
        )

    def allreduce(
        self, buffer: Buffer, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        _record("allreduce", reads=buffer, writes=buffer)

    def allreduce_from(
        self,
        source: Buffer,
        buffer: Buffer,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        _record("allreduce", reads=source, writes=buffer)

    def broadcast(self, buffer: Buffer, root_rank: int) -> None:
        _record("broadcast", reads=buffer, writes=buffer)

    def allgather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        super().allgather(send, receive, counts)
        _record("allgather", reads=send, writes=receive)

    def alltoall(
        self,
        send: Buffer,
        receive: Buffer,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        super().alltoall(send, receive, send_counts, receive_counts)
        _record("alltoall", reads=send, writes=receive)

    def reduce_scatter(
        self,
        send: Buffer,
        receive: Buffer,
        counts: Sequence[int],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        super().reduce_scatter(send, receive, counts, op)
        _record("reduce_scatter", reads=send, writes=receive)

    def split(self, ranks: Sequence[int]) -> RecordingCommunicator | None:
        return RecordingCommunicator(self._device) if 0 in ranks else None


def _record(text: str, reads: Buffer, writes: Buffer) -> None:
    spans = [
        (buffer.pointer, buffer.pointer + buffer.nbytes, written)
        for buffer, written in ((reads, False), (writes, True))
    ]
    on_host = reads.device == writes.device == "cpu"
    stream_record.note(text, spans, on_host)


def install() -> None:
    """Let init() find the engines "device", which takes memory of the device, and "host"."""
    registry.ENGINES["device"] = "stream_engine:open_device"
    registry.ENGINES["host"] = "stream_engine:open_host"
    allreduce.memmove = _memmove  # type: ignore[attr-defined,assignment]


def _memmove(target: int, source: int, nbytes: int) -> int:
    spans = [(target, target + nbytes, True), (source, source + nbytes, False)]
    stream_record.note("memmove", spans, on_host=True)
    return memmove(target, source, nbytes)


def open_device(config: Config, environ: Mapping[str, str]) -> EngineWorld:
    """Make a world of this process."""
    return EngineWorld("device", "none", RecordingCommunicator(True), (0,), ("here",))


def open_host(config: Config, environ: Mapping[str, str]) -> EngineWorld:
    """Make a world of this process."""
    return EngineWorld("host", "none", RecordingCommunicator(False), (0,), ("here",))
