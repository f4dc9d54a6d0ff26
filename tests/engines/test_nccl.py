"""What the nccl engine promises beyond the contract, on ranks that share a GPU."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

WORKER = Path(__file__).with_name("nccl_worker.py")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def test_the_host_does_not_wait_for_the_gpu() -> None:
    run_ranks(WORKER, 2, args=["the_host_goes_on"])


def test_halves_are_added_in_float32_if_one_rank_wants_it() -> None:
    wide = run_ranks(WORKER, 3, args=["halves"], env={"HVDTRAIN_HALVES_IN_FLOAT32": 1}).results
    assert wide == [258.0] * 3
    own = run_ranks(WORKER, 3, args=["halves"]).results
    assert own == [own[0]] * 3  # whichever way it was rounded


def test_two_ranks_on_one_gpu_are_refused() -> None:
    for rank, (total, text) in enumerate(run_ranks(WORKER, 2, args=["one_gpu"]).results):
        assert total == 1
        assert text.startswith(f"[rank {rank}/2] engine nccl: ranks 0 and 1 have the same GPU")
