"""A program that calls functions on ranks of a Ray of its own, and prints what it has seen."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import hvdtrain.ray
from hvdtrain.errors import HvdtrainError

RANKS = 2


def reduced(factor: float, name: str) -> tuple[int, int, float, str]:
    import hvdtrain.torch as hvd

    hvd.init()
    total = hvd.allreduce(torch.tensor([factor * (hvd.rank() + 1)]), op=hvd.Sum)
    return hvd.rank(), hvd.size(), total.item(), name


def see_results(folder: Path) -> None:
    found = hvdtrain.ray.run(reduced, (2.0,), {"name": "x"}, num_workers=RANKS)
    total = 2.0 * sum(range(1, RANKS + 1))
    assert found == [(rank, RANKS, total, "x") for rank in range(RANKS)], found
    assert hvdtrain.ray.run(os.getenv, ("NAME",), env={"NAME": "value"}) == ["value"]


def see_an_exception(folder: Path) -> None:
    def failing() -> None:
        import hvdtrain.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise ZeroDivisionError("on purpose")
        time.sleep(600)

    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        hvdtrain.ray.run(failing, num_workers=RANKS)
    assert caught.value.__notes__[0].startswith("on rank 1 of 2:\nTraceback")


def see_a_rank_without_result(folder: Path) -> None:
    def ending() -> None:
        if os.environ["RANK"] == "1":
            os._exit(7)
        time.sleep(600)

    expect(
        lambda: hvdtrain.ray.run(ending, num_workers=RANKS),
        "hvdtrain.ray.run(): rank 0, 1 of 2 ended without a result (rank 1: exit code 7)",
    )


def see_ranks_with_gpus_of_their_own(folder: Path) -> None:
    """Ray counts GPUs that it was promised, and hands out their numbers."""

    def numbers() -> tuple[str, str]:
        return os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"]

    resources = {"CPU": 1, "GPU": 1}
    found = hvdtrain.ray.run(numbers, num_workers=RANKS, resources=resources)
    assert sorted(found) == [("0", "0"), ("1", "0")]


def see_an_actor_that_is_killed(folder: Path) -> None:
    def losing() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    text = "hvdtrain.ray.run(): rank 0, 1 of 2 ended without a result (rank 1: The actor died"
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


def expect(call: Callable[[], object], text: str) -> None:
    with pytest.raises(HvdtrainError, match=re.escape(text)):
        call()


CASES = [
    see_results,
    see_an_exception,
    see_a_rank_without_result,
    see_ranks_with_gpus_of_their_own,
    see_an_actor_that_is_killed,
    see_too_few_resources,
    see_a_trainer_of_ray,
]


def main(folder: Path) -> None:
    ray.init(num_cpus=RANKS, num_gpus=RANKS, include_dashboard=False)
    for number, case in enumerate(CASES):
        own = folder / str(number)
        own.mkdir()
        case(own)
        print(f"seen: {case.__name__}", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
