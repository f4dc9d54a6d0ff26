"""Weights & Biases without a network: what it writes is read back from its own file."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    """Run the program above."""
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
