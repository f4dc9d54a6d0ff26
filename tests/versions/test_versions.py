"""Training with the oldest and the newest packages that hvdtrain claims to work with.

`make test-versions` makes the environments, and writes what has run into docs/versions.md.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from bounds import lowest
from paths import HELPERS, ROOT
from ranks import run_ranks, start

WORKER = Path(__file__).parent / "versions_worker.py"
# What ranks of other tests defer to start sooner is torch's of the pinned version.
PLAIN = {"PYTHONPATH": os.pathsep.join(map(str, HELPERS))}
# Images of two classes, black and white.
DRAW = """
import pathlib, sys
from PIL import Image
for split in ("train", "test"):
    for shade in (0, 255):
        folder = pathlib.Path(sys.argv[1], split, str(shade))
        folder.mkdir(parents=True)
        for number in range(8):
            Image.new("RGB", (32, 32), (shade,) * 3).save(folder / f"{number}.png")
"""

_VERSIONS = """
import json, platform, sys
from importlib.metadata import distributions
found = {one.name.lower().replace("_", "-"): one.version for one in distributions()}
versions = {name: found[name].partition("+")[0] for name in sys.argv[1:] if name in found}
print(json.dumps({"python": platform.python_version(), "packages": versions}))
"""
# The environments by name: "oldest", "newest", and the newest on other Pythons.
PYTHONS: dict[str, str] = json.loads(os.environ.get("HVDTRAIN_VERSIONS_PYTHONS", "{}"))

pytestmark = pytest.mark.versions


class VersionsRecord:
    def __init__(self) -> None:
        self._ends: dict[str, Any] = {}

    def note_packages(self, end: str, python: Path) -> None:
        if end not in self._ends:
            names = sorted(lowest((ROOT / "setup.py").read_text()))
            command = [str(python), "-c", _VERSIONS, *names]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            today = datetime.now(UTC).date().isoformat()
            self._ends[end] = {"date": today, **json.loads(done.stdout), "runs": {}}

    @contextmanager
    def run(self, end: str, title: str) -> Iterator[None]:
        outcomes = self._ends[end]["runs"]
        outcomes[title] = "failed"
        yield
        outcomes[title] = "passed"

    def write(self, path: Path) -> None:
        """Write what ran; what other environments did before is kept, with its day."""
        kept = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(kept | self._ends, indent=1) + "\n")


@pytest.fixture(scope="module")
def record() -> Iterator[VersionsRecord]:
    record = VersionsRecord()
    yield record
    path = os.environ.get("HVDTRAIN_VERSIONS_RECORD")
    if path:
        record.write(Path(path))


@pytest.fixture(params=PYTHONS or ["oldest", "newest"])
def end(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def python(end: str, record: VersionsRecord) -> Path:
    if end not in PYTHONS:
        pytest.skip("HVDTRAIN_VERSIONS_PYTHONS names no environment: 'make test-versions'")
    record.note_packages(end, Path(PYTHONS[end]))
    return Path(PYTHONS[end])


def run(python: Path, *words: object) -> str:
    return start([python, *words], env=PLAIN).end(code=0).stdout


def train(python: Path, out: Path, *options: object) -> dict[str, Any]:
    words = ["-m", "hvdtrain", "train", "digits", "--out", out, *options]
    run_ranks([str(word) for word in words], 2, env=PLAIN, python=python, timeout_seconds=300)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    assert len(set(summary["weights_sha256"])) == 1
    return summary


def test_pytorch(python: Path, end: str, record: VersionsRecord, tmp_path: Path) -> None:
    with record.run(end, "`train` with PyTorch: checkpoint, resume, TensorBoard, report"):
        whole = train(python, tmp_path / "whole", "--epochs", 2, "--track", "tensorboard")
        assert whole["final"]["accuracy"] > 0.5
        assert list((tmp_path / "whole" / "tensorboard").glob("events*"))
        resumed = tmp_path / "resumed"
        train(python, resumed, "--epochs", 1)
        again = train(python, resumed, "--epochs", 2, "--resume", "auto")
        assert again["weights_sha256"] == whole["weights_sha256"]
        page = tmp_path / "report.html"
        run(python, "-m", "hvdtrain", "report", tmp_path / "whole", "--out", page)
        assert "accuracy" in page.read_text()


@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_keras(
    python: Path, end: str, backend: str, record: VersionsRecord, tmp_path: Path
) -> None:
    options = ["--framework", "keras", "--backend", backend, "--epochs", 2]
    with record.run(end, f"`train --framework keras --backend {backend}`"):
        assert train(python, tmp_path / "run", *options)["final"]["accuracy"] > 0.5


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_script(python: Path, end: str, framework: str, record: VersionsRecord) -> None:
    with record.run(end, f"a script with `hvdtrain.{framework}`"):
        run_ranks(WORKER, 2, args=[framework], env=PLAIN, python=python)


def test_images(python: Path, end: str, record: VersionsRecord, tmp_path: Path) -> None:
    with record.run(end, "`train imagefolder`"):
        run(python, "-c", DRAW, tmp_path)
        small = [word for name in ("size=8", "crop=8", "width=4") for word in ("--set", name)]
        options = ["--data-dir", str(tmp_path), "--epochs", "1", "--batch-size", "6", *small]
        run_ranks(["-m", "hvdtrain", "train", "imagefolder", *options], 2, env=PLAIN, python=python)


def test_check(python: Path, end: str, record: VersionsRecord) -> None:
    with record.run(end, "`check`"):
        assert json.loads(run(python, "-m", "hvdtrain", "check", "--json"))["problems"] == []
