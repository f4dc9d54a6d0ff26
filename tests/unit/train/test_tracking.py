"""Trackers: metrics.csv, TensorBoard's files, wandb's own file, and all of them together."""

import csv
import json
import math
import os
import resource
import struct
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from hvdtrain.errors import UsageError
from hvdtrain.train.tracking.tracker import RunInfo, masked, metric_values, rank_values
from hvdtrain.train.tracking.trackers import open_trackers, tracker_names


def facts(directory: Path, resumed_step: int | None = None) -> RunInfo:
    parameters = {"lr": 0.1, "epochs": 3, "device": None, "uri": "http://me:secret@host/x"}
    return RunInfo("digits", directory, parameters, resumed_step)


def rows(directory: Path) -> list[dict[str, str]]:
    with open(directory / "metrics.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_columns_grow(tmp_path: Path) -> None:
    trackers = open_trackers("", facts(tmp_path))
    trackers.log({"train/loss": 0.1}, 10, 1.5)
    trackers.log({"test/loss": math.nan, "a, b": 1 / 3}, 10, 2.0)
    trackers.log({"train/loss": -math.inf}, 20, 3.0)
    trackers.end("finished")
    first, second, third = rows(tmp_path)
    assert list(first) == ["step", "seconds", "train/loss", "test/loss", "a, b"]
    assert list(first.values()) == ["10", "1.5", "0.1", "", ""]
    assert list(second.values()) == ["10", "2.0", "", "nan", repr(1 / 3)]
    assert list(third.values()) == ["20", "3.0", "-inf", "", ""]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_resume_drops_the_steps_that_come_again(tmp_path: Path) -> None:
    trackers = open_trackers("tensorboard", facts(tmp_path))
    for step in (10, 20, 30):
        trackers.log({"loss": step / 2}, step, float(step))
    # Without end(), as when killed, and with a torn last line.
    with open(tmp_path / "metrics.csv", "ab") as file:
        file.write(b"15,1")
    again = open_trackers("tensorboard", facts(tmp_path, resumed_step=20))
    again.log({"loss": 100.0, "accuracy": 0.5}, 30, 31.0)
    again.end("finished")
    trackers.end("failed")
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [
        ("10", "5.0"),
        ("20", "10.0"),
        ("30", "100.0"),
    ]
    assert scalars(tmp_path, "loss") == [(10, 5.0), (20, 10.0), (30, 100.0)]
    fresh = open_trackers("tensorboard", facts(tmp_path))
    fresh.log({"loss": 1.0}, 10, 1.0)
    fresh.end("finished")
    assert [row["step"] for row in rows(tmp_path)] == ["10"]
    assert scalars(tmp_path, "loss") == [(10, 1.0)]


def test_tensorboard_files(tmp_path: Path) -> None:
    before = time.time()
    trackers = open_trackers("tensorboard", facts(tmp_path))
    trackers.log({"train/loss": 0.25, "lr": math.inf}, 7, 1.0)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()  # before end(): nothing waits in a buffer
    trackers.end("finished")
    (event,) = events.Scalars("train/loss")
    assert (event.step, event.value) == (7, 0.25)
    assert before <= event.wall_time <= time.time()
    assert events.Scalars("lr")[0].value == math.inf
    content = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    told = HParamsPluginData.FromString(content).session_start_info.hparams
    assert told["lr"].number_value == 0.1
    assert told["device"].string_value == "None"
    assert told["uri"].string_value == "http://***@host/x"


def test_a_full_disk_costs_whole_records_only(tmp_path: Path) -> None:
    said: list[str] = []
    trackers = open_trackers("tensorboard", facts(tmp_path), warn=said.append)
    trackers.log({"loss": 1.0}, 1, 1.0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "metrics.csv").stat().st_size
    # A write stops at the limit, in the middle of the next record, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, limits[1]))
    try:
        trackers.log({"loss": 2.0}, 2, 2.0)
        trackers.log({"loss": 3.0}, 3, 3.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    trackers.log({"loss": 4.0}, 4, 4.0)
    trackers.end("finished")
    assert [line.partition(":")[0] for line in said] == ["csv", "tensorboard"]  # once each
    assert all("File too large" in line and "training continues" in line for line in said)
    assert [row["step"] for row in rows(tmp_path)] == ["1", "4"]
    assert scalars(tmp_path, "loss") == [(1, 1.0), (4, 4.0)]


def test_bad_names_and_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracker_names(" mlflow,,tensorboard , mlflow") == ("mlflow", "tensorboard")
    assert tracker_names("") == ()
    with pytest.raises(UsageError, match="unknown --track 'mlfow': choose from tensorboard, mlf"):
        open_trackers("mlfow", facts(tmp_path))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"wandb needs .* not installed: pip install wandb$"):
        open_trackers("tensorboard, wandb", facts(tmp_path))
    assert list(tmp_path.iterdir()) == []  # found before anything was begun


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:p@ss/w@host:80/a", "https://***@host:80/a"),
        ("at postgresql+psycopg://token@db/x, and so", "at postgresql+psycopg://***@db/x, and so"),
        ("http://h/?a=1&password=x&b=2", "http://h/?a=1&password=***&b=2"),
        ("http://h?api_key=x", "http://h?api_key=***"),
        ("sqlite:////tmp/a@b.db", "sqlite://***@b.db"),
        ("me@home, ./runs", "me@home, ./runs"),
    ],
)
def test_passwords_are_masked(text: str, expected: str) -> None:
    assert masked(text) == expected


def test_figures() -> None:
    line = {"epoch": 2, "step": 30, "split": "test", "seconds": 4.5, "lr": 0.1, "loss": None}
    found = metric_values({**line, "confusion": [[1, 2], [3, 4]]})
    assert math.isnan(found.pop("test/loss"))
    assert found == {"epoch": 2.0, "test/lr": 0.1}
    ranks = {"step": 3, "seconds": 1.0, "span": 2.0, "waiting": [0.5, 1.5], "gpu": [None, 8]}
    assert rank_values(ranks) == {
        "system/waiting/rank_0": 0.5,
        "system/waiting/rank_1": 1.5,
        "system/gpu/rank_1": 8.0,
    }
    seventeen = [float(rank) for rank in range(17)]
    assert rank_values({"step": 3, "waiting": seventeen, "gpu": [None] * 17}) == {
        "system/waiting/mean": 8.0,
        "system/waiting/min": 0.0,
        "system/waiting/max": 16.0,
    }


BLOCK_BYTES = 32768
# wandb starts a process and threads that end with the process that has called it.
PROGRAM = """
import sys
from pathlib import Path
from hvdtrain.train.tracking.tracker import RunInfo
from hvdtrain.train.tracking.trackers import open_trackers
directory, resumed = Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else None
facts = RunInfo("digits", directory, {"lr": 0.1, "epochs": 3 if resumed is None else 4}, resumed)
trackers = open_trackers("wandb", facts, experiment="my project", run_name="mine")
for step in range(resumed or 0, 20):
    trackers.log({"train/loss": step / 3}, step, step / 10)
(directory / "summary.json").write_text("{}")
trackers.artifact(directory / "summary.json")
print(Path(trackers._trackers["wandb"]._run.dir).parent)
trackers.end("stopped" if resumed is None else "finished")
"""


def run(directory: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    # How long wandb waits for its own process, however slow the machine is.
    environment |= {"WANDB__SERVICE_WAIT": "300", "WANDB_INIT_TIMEOUT": "300"}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory), *arguments],
        env={**environment, "HOME": str(directory), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def records(path: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file: protocol buffers in the log format of LevelDB."""
    from wandb.proto import wandb_internal_pb2

    record: Any = wandb_internal_pb2  # which lists none of its names
    data, at, parts = path.read_bytes(), 7, b""  # after the file's own header
    while at + 7 <= len(data):
        if BLOCK_BYTES - at % BLOCK_BYTES < 7:  # a header does not fit
            at += BLOCK_BYTES - at % BLOCK_BYTES
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in {1, 4}:  # whole, or the last part
            yield record.Record.FromString(parts)
            parts = b""


def test_offline(tmp_path: Path) -> None:
    first = run(tmp_path, WANDB_MODE="offline")
    second = run(tmp_path, "10", WANDB_MODE="offline")
    for done in (first, second):
        assert (done.returncode, done.stderr) == (0, "")
    ids, logged = set(), []
    for done in (first, second):
        folder = Path(done.stdout.strip())
        (file,) = folder.glob("*.wandb")
        seen: dict[str, list[float]] = defaultdict(list)
        for record in records(file):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
                names = (record.run.project, record.run.display_name)
                config = {item.key: item.value_json for item in record.run.config.update}
            for item in record.history.item:
                seen[item.key or "/".join(item.nested_key)].append(json.loads(item.value_json))
        assert names == ("my project", "mine")
        assert config["lr"] == "0.1"
        assert (folder / "files" / "summary.json").read_text() == "{}"
        logged.append((seen["step"], seen["train/loss"], seen["seconds"]))
    assert len(ids) == 1  # one run, resumed
    assert json.loads((tmp_path / "wandb.json").read_text()) == {"id": ids.pop()}
    for steps, losses, seconds in logged:
        assert losses == [step / 3 for step in steps]
        assert seconds == [step / 10 for step in steps]
    assert [steps for steps, _, _ in logged] == [list(range(20)), list(range(10, 20))]


def test_nobody_is_logged_in(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode != 0
    assert "nobody is logged in: run `wandb login`, set WANDB_API_KEY" in done.stderr
