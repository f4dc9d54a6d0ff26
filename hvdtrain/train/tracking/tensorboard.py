"""Event files for TensorBoard, written with the classes of the package `tensorboard` itself.

torch.utils.tensorboard would need torch, and tensorboard's EventFileWriter loads TensorFlow if that
is installed. RecordWriter needs neither and has no thread: logged values are in the file at once.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from hvdtrain.train.tracking.tracker import AppendFile, RunInfo, Status

FOLDER = "tensorboard"


class TensorBoard:
    """Tracker that writes an event file in the run's folder `tensorboard`, one per start."""

    def __init__(self, info: RunInfo) -> None:
        self._folder = info.directory / FOLDER
        self._folder.mkdir(exist_ok=True)
        self._file = AppendFile(self._folder / _file_name())
        self._writer = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        # TensorBoard discards values of earlier files from this step on.
        first_step = 0 if info.resumed_step is None else info.resumed_step + 1
        self._add(step=first_step, session_log=SessionLog(status=SessionLog.START))
        self._add(summary=_hyperparameters(info))

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step=step, summary=Summary(value=scalars))

    def artifact(self, path: Path) -> None:
        """Do nothing: TensorBoard shows no files."""

    def end(self, status: Status) -> None:
        self._file.close()

    def _add(self, **content: Any) -> None:
        self._writer.write(Event(wall_time=time.time(), **content).SerializeToString())


def _file_name() -> str:
    # TensorBoard reads the files of a folder in the order of their names.
    nanoseconds = time.time_ns()
    return f"events.out.tfevents.{nanoseconds // 10**9:010d}.{nanoseconds % 10**9:09d}" + (
        f".{socket.gethostname()}.{os.getpid()}"
    )


def _hyperparameters(info: RunInfo) -> Summary:
    plain = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in info.parameters.items()
    }
    return hparams_pb(plain, trial_id=info.name, start_time_secs=time.time())
