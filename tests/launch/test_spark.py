"""`hvdtrain.spark` on a Spark with two workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_python import cluster_python
from ranks import start

DRIVER = Path(__file__).with_name("spark_driver.py")
CASES = 8


@pytest.mark.spark
def test_a_driver(tmp_path: Path) -> None:
    python = cluster_python()
    env = {"PYSPARK_PYTHON": python, "SPARK_WORKER_DIR": tmp_path / "workers"}
    with start([str(python), "-P", str(DRIVER), str(tmp_path)], env=env) as job:
        done = job.wait(300)
        assert done.returncode == 0, done.stderr[-5000:]
        assert done.stdout.count("seen: ") == CASES, done.stdout
        job.assert_nothing_left(30)
