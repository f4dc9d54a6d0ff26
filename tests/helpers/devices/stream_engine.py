"""An engine of one rank that records when it uses which memory; see stream_record."""

from collections.abc import Mapping, Sequence
from ctypes import memmove
from dataclasses import replace
from typing import Any

import stream_record
from hidden_memory import DEVICE

from hvdtrain import engines
from hvdtrain.buffer import Buffer
from hvdtrain.config import Config
from hvdtrain.core import allreduce
from hvdtrain.engines.communicator import EngineWorld
from hvdtrain.engines.local import LocalCommunicator


def _recorded(name: str) -> Any:
    def call(self: "RecordingCommunicator", send: Buffer, receive: Buffer, *how: Any) -> None:
        getattr(LocalCommunicator, name)(self, send, receive, *how)
        _record(name, reads=send, writes=receive)

    return call


class RecordingCommunicator(LocalCommunicator):
    """Uses memory of a device on the current stream, and that of the host at once."""

    def __init__(self, device: bool) -> None:
        devices = frozenset({"cpu", DEVICE} if device else {"cpu"})
        self._device = device
        # With a thread for each channel, as nccl and gloo have.
        self.capabilities = replace(
            LocalCommunicator.capabilities, devices=devices, concurrent=True
        )

    def allreduce(self, buffer: Buffer, *_: object, **__: object) -> None:
        _record("allreduce", reads=buffer, writes=buffer)

    def allreduce_from(self, source: Buffer, buffer: Buffer, *_: object) -> None:
        _record("allreduce", reads=source, writes=buffer)

    def broadcast(self, buffer: Buffer, root_rank: int) -> None:
        _record("broadcast", reads=buffer, writes=buffer)

    allgather, alltoall, reduce_scatter = map(
        _recorded, ("allgather", "alltoall", "reduce_scatter")
    )

    def split(self, ranks: Sequence[int]) -> "RecordingCommunicator | None":
        return RecordingCommunicator(self._device) if 0 in ranks else None


def _record(text: str, reads: Buffer, writes: Buffer) -> None:
    spans = [
        (buffer.pointer, buffer.pointer + buffer.nbytes, written)
        for buffer, written in ((reads, False), (writes, True))
    ]
    stream_record.note(text, spans, reads.device == writes.device == "cpu")


def install() -> None:
    engines.ENGINES["device"] = "stream_engine:open_device"
    engines.ENGINES["host"] = "stream_engine:open_host"
    allreduce.memmove = _memmove  # type: ignore[attr-defined,assignment]


def _memmove(target: int, source: int, nbytes: int) -> int:
    spans = [(target, target + nbytes, True), (source, source + nbytes, False)]
    stream_record.note("memmove", spans, on_host=True)
    return memmove(target, source, nbytes)


def open_device(config: Config, environ: Mapping[str, str]) -> EngineWorld:
    return EngineWorld("device", "none", RecordingCommunicator(True), (0,), ("here",))


def open_host(config: Config, environ: Mapping[str, str]) -> EngineWorld:
    return EngineWorld("host", "none", RecordingCommunicator(False), (0,), ("here",))
