"""Files appear whole or not at all, and bad directories are refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.files import replacing, sync_directory
from hvdtrain.train.records.files import new_directory, prepare_directory


def test_published_in_one_step(tmp_path: Path) -> None:
    target = tmp_path / "it"
    target.write_bytes(b"old")
    with replacing(target) as file:
        file.write(b"new")
        assert target.read_bytes() == b"old"
    assert target.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_system_that_does_not_sync_directories(tmp_path: Path) -> None:
    proc = Path("/proc")  # one that does not
    descriptor = os.open(proc, os.O_RDONLY)
    with pytest.raises(OSError, match="Invalid argument"):
        os.fsync(descriptor)
    os.close(descriptor)
    sync_directory(proc)
    sync_directory(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_directory(tmp_path / "gone")


@pytest.mark.parametrize("end", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_nothing_stays_of_what_was_not_finished(tmp_path: Path, end: type[BaseException]) -> None:
    target = tmp_path / "it"
    target.write_bytes(b"old")

    def write() -> None:
        with replacing(target) as file:
            file.write(b"half")
            file.flush()
            assert len(list(tmp_path.iterdir())) == 2
            raise end

    with pytest.raises(end):
        write()
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(300)
    return process.pid


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    (tmp_path / f".unfinished-{socket.gethostname()}-{dead_process()}").write_bytes(b"half")
    (tmp_path / "checkpoint.pt").write_bytes(b"whole")
    prepare_directory(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_what_another_job_is_writing_stays(tmp_path: Path) -> None:
    here = tmp_path / f".unfinished-{socket.gethostname()}-{os.getppid()}"
    elsewhere = tmp_path / f".unfinished-{socket.gethostname()}x-{dead_process()}"
    for path in (here, elsewhere):
        path.write_bytes(b"half")
    prepare_directory(tmp_path)
    assert sorted(tmp_path.iterdir()) == [here, elsewhere]


def test_leftovers_of_another_host_are_removed_after_a_day(tmp_path: Path) -> None:
    path = tmp_path / ".unfinished-elsewhere-1"
    path.write_bytes(b"half")
    day_before = time.time() - 90_000
    os.utime(path, (day_before, day_before))
    prepare_directory(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_parents_are_made(tmp_path: Path) -> None:
    prepare_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_is_no_directory(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file.* cannot be written .*--out"):
        prepare_directory(tmp_path / "file" / below)


def test_read_only_directory_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        prepare_directory(Path("/proc/self/net"))


def test_new_directories_differ(tmp_path: Path) -> None:
    made = {new_directory(tmp_path / "runs", "digits") for _ in range(5)}
    assert len(made) == 5
    assert all(path.is_dir() and path.name.startswith("digits-") for path in made)
