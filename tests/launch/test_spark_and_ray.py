"""`hvdtrain.spark` on a Spark with two workers, and `hvdtrain.ray` on a Ray of one node.

The calls are those that docs/spark-and-ray.md shows.
"""

from pathlib import Path

import pytest
from environments import named_python
from ranks import start

HERE = Path(__file__).parent
LIMIT_SECONDS = 400


@pytest.mark.parametrize(
    ("driver", "cases"),
    [
        pytest.param("spark_driver.py", 9, marks=pytest.mark.spark),
        pytest.param("ray_driver.py", 8, marks=pytest.mark.ray),
    ],
)
def test_a_driver(driver: str, cases: int, tmp_path: Path) -> None:
    python = named_python("HVDTRAIN_CLUSTERS_PYTHON", "Spark and Ray")
    env = {"PYSPARK_PYTHON": python}
    with start([str(python), "-P", str(HERE / driver), str(tmp_path)], env=env) as job:
        done = job.wait(LIMIT_SECONDS)
        assert done.returncode == 0, done.stderr[-5000:]
        assert done.stdout.count("seen\n") == cases, done.stdout
        job.assert_nothing_left()
