"""A driver of Spark on two workers that calls functions on ranks, and prints what it has seen."""

import itertools
import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import mlflow
import pyspark
from cluster_cases import RANKS, expect, reduced, see_all
from pyspark.sql import SparkSession

import hvdtrain.spark

SCRIPT = """
import sys
import beside
import torch.distributed as dist
dist.init_process_group("gloo")
open(sys.argv[1] + str(dist.get_rank()), "w").write(str(dist.get_world_size()))
dist.barrier()  # else one could leave while the other still connects
dist.destroy_process_group()
"""


def see_an_executor_that_is_lost(folder: Path) -> None:
    """Spark starts the tasks again, and no rank may start again with them."""

    def losing() -> None:
        with (folder / f"starts{os.environ['RANK']}").open("a") as file:
            file.write("x")
        if os.environ["RANK"] == "1":
            other = folder / "starts0"
            while not (other.exists() and other.read_text()):
                time.sleep(0.01)
            os.kill(executor_of(os.getpid()), 9)
        time.sleep(600)

    text = "hvdtrain.spark.run(): ranks 0, 1 of 2 ended without a result ("
    expect(lambda: hvdtrain.spark.run(losing, num_proc=RANKS), text)
    assert [(folder / f"starts{rank}").read_text() for rank in range(RANKS)] == ["x", "x"]


def executor_of(pid: int) -> int:
    while b"java" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def see_too_few_slots(folder: Path) -> None:
    expect(
        lambda: hvdtrain.spark.run(os.getpid, num_proc=9, start_timeout=2),
        "hvdtrain.spark.run(): 0 of 9 ranks have started within 2 s: does the cluster have",
    )


def see_one_run_of_mlflow(folder: Path) -> None:
    def logging() -> str:
        import mlflow

        if os.environ["RANK"] == "0":
            mlflow.log_metric("loss", 0.5)
        run = mlflow.active_run()
        return "" if run is None else run.info.run_id

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    with mlflow.start_run() as run:
        assert hvdtrain.spark.run(logging, num_proc=RANKS) == [run.info.run_id, ""]
        for local in (False, True):
            distributor = hvdtrain.spark.Distributor(RANKS, local_mode=local, use_gpu=False)
            assert distributor.run(logging) == run.info.run_id, local
    client = mlflow.MlflowClient()
    assert client.get_run(run.info.run_id).data.metrics == {"loss": 0.5}
    assert len(client.search_runs(["0"])) == 1


def see_a_distributor(folder: Path) -> None:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    (folder / "beside.py").touch()
    for local in (False, True):
        distributor = hvdtrain.spark.Distributor(RANKS, local_mode=local, use_gpu=False)
        assert distributor.run(reduced, 1.0, name="y") == (0, RANKS, 3.0, "y")
        distributor.run(str(script), folder / f"local{local}")
        sizes = [(folder / f"local{local}{rank}").read_text() for rank in range(RANKS)]
        assert sizes == [str(RANKS)] * RANKS


def see_rows_of_a_dataframe(folder: Path) -> None:
    spark = SparkSession.builder.getOrCreate()
    path = str(folder / "rows")
    spark.range(0, 101, 1, 5).write.parquet(path)

    def numbers() -> list[Any]:
        from hvdtrain.data.parquet import read_shard

        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return read_shard(path, rank, size).column("id").to_pylist()

    shards = hvdtrain.spark.run(numbers, num_proc=RANKS)
    assert sorted(map(len, shards)) == [50, 51]
    assert sorted(itertools.chain(*shards)) == list(range(101))


def see_another_process(folder: Path) -> None:
    assert hvdtrain.spark.run(os.getpid, num_proc=1) != [os.getpid()]


def main() -> None:
    builder = SparkSession.builder.master(f"local-cluster[{RANKS},1,1024]")
    spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    see_all(
        partial(hvdtrain.spark.run, num_proc=RANKS),
        [
            *(see_another_process, see_too_few_slots, see_one_run_of_mlflow, see_a_distributor),
            *(see_rows_of_a_dataframe, see_an_executor_that_is_lost),
        ],
    )
    logs = Path(pyspark.__file__).parent / "work" / spark.sparkContext.applicationId
    spark.stop()
    shutil.rmtree(logs, ignore_errors=True)


if __name__ == "__main__":
    main()
