"""hvdtrain.torch on a device whose memory the host cannot read: nothing is staged."""

from pathlib import Path

import pytest
from ranks import launch, run_ranks

WORKER = Path(__file__).parent / "torch_hidden_worker.py"
ENGINE = {"HVDTRAIN_ENGINE": "hidden"}


@pytest.mark.parametrize(
    ("np", "cases"),
    [
        (1, "optimizers"),
        (2, "operations+optimizers"),  # what is staged does not depend on how many ranks there are
        pytest.param(3, "operations+optimizers", marks=pytest.mark.soak),
        pytest.param(4, "optimizers", marks=pytest.mark.soak),
    ],
)
def test_nothing_is_staged(np: int, cases: str) -> None:
    done = run_ranks(WORKER, np, args=[cases], env=ENGINE, timeout_seconds=300, warm="torch")
    assert done.results == [[]] * np  # nor is there a refusal that was swallowed


@pytest.mark.soak
def test_exchanges_and_shared_steps_stage_nothing() -> None:
    # Many buckets, some of them with several parameters.
    env = {**ENGINE, "HVDTRAIN_BUCKET_BYTES": 600, "HVDTRAIN_FIRST_BUCKET_BYTES": 100}
    done = run_ranks(
        WORKER, 2, args=["sharded+exchanges"], env=env, timeout_seconds=300, warm="torch"
    )
    assert done.results == [[], []]


@pytest.mark.parametrize("cases", ["operations", "optimizers"])
def test_staging_is_caught(cases: str) -> None:
    done = launch(WORKER, 2, args=[cases, "staged"], env=ENGINE, warm="torch").end()
    assert done.returncode != 0
    assert "reads memory of device 'hidden' from the host" in done.stderr
