"""All trackers of a run as one: metrics.csv, TensorBoard, Weights & Biases, and MLflow."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.files import replacing
from hvdtrain.train.tracking.tracker import (
    AppendFile,
    RunInfo,
    Status,
    Tracker,
    load_json,
    masked,
    one_line,
    save_json,
)

METRICS_CSV = "metrics.csv"
_FIRST_COLUMNS = ("step", "seconds")


class CsvFile:
    """Tracker that writes metrics.csv: step, seconds, then a column for each name it has seen.

    Rows after the step that a run is resumed from are dropped. A cell is empty if the row has no
    such value.
    """

    def __init__(self, info: RunInfo) -> None:
        self._path = info.directory / METRICS_CSV
        self._columns: list[str] = list(_FIRST_COLUMNS)
        rows: list[list[str]] = []
        if info.resumed_step is not None and self._path.exists():
            self._columns, rows = _read(self._path)
            rows = [row for row in rows if int(row[0]) <= info.resumed_step]
        self._file = self._rewrite(rows)

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        new = [name for name in values if name not in self._columns]
        if new:
            self._grow(new)
        cells: dict[str, float] = {**values, "step": step, "seconds": seconds}
        row = [repr(cells[name]) if name in cells else "" for name in self._columns]
        self._file.write(_lines([row]))

    def artifact(self, path: Path) -> None:
        """Do nothing: the file is in the same directory."""

    def end(self, status: Status) -> None:
        self._file.close()

    def _grow(self, new: Sequence[str]) -> None:
        _, rows = _read(self._path)
        before, self._columns = self._columns, [*self._columns, *new]
        try:
            file = self._rewrite([[*row, *[""] * len(new)] for row in rows])
        except OSError:
            self._columns = before
            raise
        self._file.close()
        self._file = file

    def _rewrite(self, rows: Iterable[Sequence[str]]) -> AppendFile:
        """Replace the file atomically, and open it for appending."""
        with replacing(self._path) as file:
            file.write(_lines([self._columns, *rows]))
        return AppendFile(self._path)


def _read(path: Path) -> tuple[list[str], list[list[str]]]:
    """Return the columns and the complete rows."""
    text = path.read_text(encoding="utf-8", errors="replace")
    whole = text[: text.rfind("\n") + 1].split("\n")[:-1]
    columns, *rows = list(csv.reader(whole)) or [list(_FIRST_COLUMNS)]
    if tuple(columns[:2]) != _FIRST_COLUMNS:
        return list(_FIRST_COLUMNS), []
    return columns, [row for row in rows if len(row) == len(columns) and row[0].isdecimal()]


def _lines(rows: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


class TensorBoard:
    """Tracker that writes an event file in the run's folder `tensorboard`, one per start.

    It uses the classes of the package `tensorboard` itself: torch.utils.tensorboard would need
    torch, and tensorboard's EventFileWriter loads TensorFlow if that is installed. RecordWriter
    needs neither and has no thread: logged values are in the file at once.
    """

    def __init__(self, info: RunInfo) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder = info.directory / "tensorboard"
        folder.mkdir(exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        at, process = f"{seconds:010d}.{nanoseconds:09d}", f"{socket.gethostname()}.{os.getpid()}"
        self._file = AppendFile(folder / f"events.out.tfevents.{at}.{process}")
        self._writer = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        # TensorBoard discards values of earlier files from this step on.
        first_step = 0 if info.resumed_step is None else info.resumed_step + 1
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(step=first_step, session_log=start)
        plain = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in info.parameters.items()
        }
        self._add(summary=hparams_pb(plain, trial_id=info.name, start_time_secs=time.time()))

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        value = self._summary.Value
        scalars = [value(tag=name, simple_value=number) for name, number in values.items()]
        self._add(step=step, summary=self._summary(value=scalars))

    def artifact(self, path: Path) -> None:
        """Do nothing: TensorBoard shows no files."""

    def end(self, status: Status) -> None:
        self._file.close()

    def _add(self, **content: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **content).SerializeToString())


class Wandb:
    """Tracker that passes values on to the process that wandb starts: one run, resumed by its id.

    WANDB_MODE=offline writes it into the directory.
    """

    def __init__(self, info: RunInfo, project: str | None, run_name: str | None) -> None:
        import wandb

        path = info.directory / "wandb.json"
        run_id = (load_json(path, "id") or {"id": secrets.token_hex(4)})["id"]
        try:
            mode = wandb.setup().settings.mode
            if mode == "online" and not wandb.login(prompt=False):
                raise UsageError(
                    "--track wandb: nobody is logged in: run `wandb login`, set WANDB_API_KEY, or "
                    "work without a network with WANDB_MODE=offline"
                )
            self._run = wandb.init(
                project=project or "hvdtrain",
                name=run_name or info.name,
                id=run_id,
                resume="allow",
                dir=info.directory,
                config=dict(info.parameters),
                # The terminal belongs to the progress bar, and a resume may change options.
                settings=wandb.Settings(console="off", silent=True),
                allow_val_change=True,
            )
        except wandb.Error as error:
            raise UsageError(f"--track wandb: {one_line(error)}") from error
        # A resume goes back to steps that wandb would drop as too old.
        self._run.define_metric("*", step_metric="step")
        save_json(path, {"id": run_id})

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        self._run.log({**values, "step": step, "seconds": seconds})

    def artifact(self, path: Path) -> None:
        """Upload a file; offline, link to it."""
        with contextlib.redirect_stderr(io.StringIO()):  # it says that it links
            self._run.save(path.absolute(), base_path=path.absolute().parent, policy="now")

    def end(self, status: Status) -> None:
        """Wait until everything is sent, as long as wandb does."""
        if status == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == "finished" else 1)


TRACKERS = ("tensorboard", "mlflow", "wandb")

Warn = Callable[[str], None]


def tracker_names(names: str) -> tuple[str, ...]:
    """Return the trackers that a comma-separated list names, each once."""
    found = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in found:
        if name not in TRACKERS:
            raise UsageError(f"unknown --track {name!r}: choose from {', '.join(TRACKERS)}")
    return found


class Trackers:
    """The trackers of a run; used on rank 0 only.

    Nothing is raised: a tracker that fails is reported once, and tried again the next time.
    """

    def __init__(self, trackers: Mapping[str, Tracker], warn: Warn) -> None:
        self._trackers = dict(trackers)
        self._warn = warn
        self._warned: set[str] = set()

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        self._each(lambda tracker: tracker.log(values, step, seconds))

    def artifact(self, path: Path) -> None:
        self._each(lambda tracker: tracker.artifact(path))

    def end(self, status: Status) -> None:
        trackers, self._trackers = self._trackers, {}
        for name, tracker in trackers.items():
            try:
                tracker.end(status)
            except Exception as error:
                self._warn(f"{name}: {one_line(error)}")

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in self._trackers.items():
            try:
                call(tracker)
            except Exception as error:  # training is worth more than any tracker
                if name not in self._warned:
                    self._warned.add(name)
                    self._warn(f"{name}: {one_line(error)}; training continues")


def open_trackers(
    names: str,
    info: RunInfo,
    tracking_uri: str | None = None,
    experiment: str | None = None,
    run_name: str | None = None,
    warn: Warn | None = None,
) -> Trackers:
    """Open metrics.csv and the trackers that a comma-separated list names (rank 0 only)."""
    wanted = tracker_names(names)
    for name in wanted:
        if importlib.util.find_spec(name) is None:
            raise UsageError(
                f"--track {name} needs the package {name}, which is not installed: "
                f"pip install {name}"
            )
    parameters = {
        key: value if isinstance(value, bool | int | float | None) else masked(str(value))
        for key, value in info.parameters.items()
    }
    info = replace(info, parameters=parameters)
    opened: dict[str, Tracker] = {"csv": CsvFile(info)}
    try:
        for name in wanted:
            opened[name] = _open(name, info, tracking_uri, experiment, run_name)
    except BaseException:
        Trackers(opened, warn or _print).end("failed")
        raise
    return Trackers(opened, warn or _print)


def _open(
    name: str, info: RunInfo, uri: str | None, experiment: str | None, run_name: str | None
) -> Tracker:
    try:
        if name == "tensorboard":
            return TensorBoard(info)
        if name == "mlflow":
            from hvdtrain.train.tracking.mlflow import Mlflow

            return Mlflow(info, uri, experiment, run_name)
        return Wandb(info, experiment, run_name)
    except ImportError as error:
        raise UsageError(
            f"--track {name}: the package {name} is installed, but does not load "
            f"({one_line(error)}): pip install --force-reinstall {name}"
        ) from error


def _print(line: str) -> None:
    print(f"hvdtrain: {line}", file=sys.stderr, flush=True)
