"""The scripts for Grid Engine, submitted to it: this machine as its only host."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gridengine import GridEngine, require_grid_engine
from run_files import require_each_sample_once, summary_of

WORKER = Path(__file__).with_name("job_worker.py")
LIMIT_SECONDS = 300
# Notice is given after 26 seconds, when steps of two seconds are under way; without these a job
# on busy cores is done long before.
OPTIONS = ["--ranks-per-node", 2, "--cpus-per-rank", 1, "--time", "2m", "--notice", "94s"]
HOSTS = """\
#$ -S /bin/bash
#$ -N hosts
#$ -pe mpi 3
#$ -j y
echo "$NSLOTS slots"
{python} -m hvdtrain hosts --from sge
"""


@pytest.mark.gridengine
def test_generated_scripts(tmp_path: Path) -> None:
    require_grid_engine()
    (tmp_path / "engine").mkdir()
    (tmp_path / "hosts.sh").write_text(HOSTS.format(python=sys.executable))
    with GridEngine(tmp_path / "engine") as engine:
        limited = engine.submit(
            written(tmp_path, "limited", "--array", "2-2", "--", WORKER, "slow")
        )
        hosts = engine.submit(tmp_path / "hosts.sh")
        dies = engine.submit(written(tmp_path, "dies", "--", WORKER, "dies"))
        assert engine.wait_for_exits(hosts, 1, LIMIT_SECONDS) == [0]
        assert engine.wait_for_exits(dies, 1, LIMIT_SECONDS) == [128 + signal.SIGKILL]
        exits = engine.wait_for_exits(limited, 2, LIMIT_SECONDS)
        while exits[-1] == 99:  # a busy machine may need more than 26 seconds for the rest, too
            exits = engine.wait_for_exits(limited, len(exits) + 1, LIMIT_SECONDS)
        assert (set(exits[:-1]), exits[-1]) == ({99}, 0)
    said = (tmp_path / f"hosts.o{hosts}").read_text().splitlines()
    assert said == ["3 slots", "localhost slots=3"]
    assert "places all.q all.q" in (tmp_path / f"dies.o{dies}").read_text()
    a_job_that_met_its_time_limit(tmp_path, (tmp_path / f"limited.o{limited}.2").read_text())


def a_job_that_met_its_time_limit(directory: Path, output: str) -> None:
    """One of an array: it saved, and went on. Every sample was used once in each epoch."""
    assert "was asked to stop" in output
    require_each_sample_once(directory)
    summary = summary_of(directory / "runs" / "limited-2")
    assert (summary["samples"], summary["world_size"]) == (2 * 1437, 2)


def written(directory: Path, name: str, *words: object) -> Path:
    options = [*OPTIONS, "--name", name, "--python", sys.executable, *words]
    command = [sys.executable, "-m", "hvdtrain", "job", "sge", *map(str, options)]
    script = directory / f"{name}.sh"
    with script.open("w") as file:
        subprocess.run(command, stdout=file, timeout=300, check=True)
    return script
