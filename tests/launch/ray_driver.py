"""A program that calls functions on ranks of a Ray of its own, and prints what it has seen."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import ray
import torch
from cluster_cases import RANKS, expect, see_all
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import hvdtrain.ray


def see_ranks_with_gpus_of_their_own(folder: Path) -> None:
    """Ray counts GPUs that it was promised, and hands out their numbers."""

    def numbers() -> tuple[str, str]:
        return os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"]

    found = hvdtrain.ray.run(numbers, num_workers=RANKS, resources={"CPU": 1, "GPU": 1})
    assert sorted(found) == [("0", "0"), ("1", "0")]


def see_an_actor_that_is_killed(folder: Path) -> None:
    def losing() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    text = "hvdtrain.ray.run(): ranks 0, 1 of 2 ended without a result (rank 1: The actor died"
    expect(lambda: hvdtrain.ray.run(losing, num_workers=RANKS), text)


def see_too_few_resources(folder: Path) -> None:
    expect(
        lambda: hvdtrain.ray.run(os.getpid, num_workers=RANKS + 1, start_timeout=1),
        "hvdtrain.ray.run(): Ray could not provide 3 times {'CPU': 1} within 1 s: ",
    )


def see_a_trainer_of_ray(folder: Path) -> None:
    """Its ranks have all variables that init() needs."""

    def loop() -> None:
        import hvdtrain.torch as hvd

        hvd.init()
        total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
        (folder / f"rank{hvd.rank()}").write_text(f"{total} {hvd.size()}")
        hvd.shutdown()

    scaling = ScalingConfig(num_workers=RANKS)
    config = RunConfig(storage_path=str(folder / "results"))
    TorchTrainer(loop, scaling_config=scaling, run_config=config).fit()
    assert [(folder / f"rank{rank}").read_text() for rank in range(RANKS)] == ["3.0 2"] * RANKS


def see_variables(folder: Path) -> None:
    assert hvdtrain.ray.run(os.getenv, ("NAME",), env={"NAME": "value"}) == ["value"]


if __name__ == "__main__":
    ray.init(num_cpus=RANKS, num_gpus=RANKS, include_dashboard=False)
    see_all(
        partial(hvdtrain.ray.run, num_workers=RANKS),
        [
            *(see_variables, see_ranks_with_gpus_of_their_own, see_an_actor_that_is_killed),
            *(see_too_few_resources, see_a_trainer_of_ray),
        ],
    )
    ray.shutdown()
