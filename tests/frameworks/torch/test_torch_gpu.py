"""hvdtrain.torch on a GPU, which several ranks may share: over NCCL, and through host memory."""

from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).parent / "torch_gpu_worker.py"
SMALL = {"HVDTRAIN_BUCKET_BYTES": 600, "HVDTRAIN_FIRST_BUCKET_BYTES": 100}
RunTopics = Callable[..., str]

pytestmark = pytest.mark.gpu


@pytest.fixture
def run_topics(record_property: Callable[[str, object], None]) -> RunTopics:
    def run(engine: str, np: int, *topics: str, **variables: object) -> str:
        done = run_ranks(
            WORKER,
            np,
            args=["cuda", *topics],
            env={"HVDTRAIN_ENGINE": engine, **variables},
            timeout_seconds=280,
        )
        failed = {case: text for result in done.results for case, text in result["failed"].items()}
        if failed:
            pytest.fail(f"{failed}\n--- stderr\n{done.stderr[-20_000:]}", pytrace=False)
        for name, figure in done.results[0]["figures"].items():
            record_property(name, figure)
        return done.stderr

    return run


@pytest.mark.parametrize("np", [1, 2, 3])
@pytest.mark.parametrize("topic", ["operations", "optimizers"])
def test_nccl(topic: str, np: int, run_topics: RunTopics) -> None:
    assert "through host memory" not in run_topics("nccl", np, topic)


@pytest.mark.parametrize("np", [1, 2])  # a third is no number, and NCCL multiplies before it adds
def test_nccl_with_halves_as_on_the_cpu(np: int, run_topics: RunTopics) -> None:
    run_topics("nccl", np, "operations of the cpu", HVDTRAIN_HALVES_IN_FLOAT32=1)


@pytest.mark.parametrize("np", [1, 2])
@pytest.mark.parametrize("topic", ["optimizers of the cpu", "step", "graphs"])
def test_nccl_further(topic: str, np: int, run_topics: RunTopics) -> None:
    run_topics("nccl", np, topic)


def test_nccl_with_many_buckets(run_topics: RunTopics) -> None:
    run_topics("nccl", 2, "optimizers", "optimizers of the cpu", **SMALL)


@pytest.mark.parametrize(("engine", "np"), [("mpi", 2), ("mpi", 3), ("gloo", 2)])
def test_through_host_memory(engine: str, np: int, run_topics: RunTopics) -> None:
    stderr = run_topics(engine, np, "operations", "optimizers", "step")
    assert f"are copied through host memory: engine {engine} takes no GPU memory" in stderr


def test_one_process_alone(run_topics: RunTopics) -> None:
    run_topics("local", 1, "operations", "optimizers", "step", "graphs")
