"""When "auto" takes nccl, and what it says when it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain.engines.registry import VisibleGpus, find_visible_gpus, reason_against_nccl

NODES, HOSTS = (0, 0, 2, 2), ("a", "a", "b", "b")


def modules(gpus: int, *others: str, nccl: bool = True, usable: bool = True) -> dict[str, Any]:
    distributed = SimpleNamespace(is_available=lambda: True, is_nccl_available=lambda: nccl)
    cuda = SimpleNamespace(device_count=lambda: gpus, is_available=lambda: usable)
    torch = SimpleNamespace(distributed=distributed, cuda=cuda)
    return {"torch": torch} | dict.fromkeys(others)


@pytest.mark.parametrize(
    ("counts", "objection"),
    [
        ((2, 2, 2, 2), None),
        ((8, 8, 2, 3), None),
        ((0, 0, 0, 0), ""),
        ((-1, -1, -1, -1), ""),
        ((2, 2, 2, 0), "rank 3 on b sees no GPU"),
        ((2, 2, -1, 2), "rank 2 has not loaded hvdtrain.torch with NCCL, but others have"),
        ((2, 2, 1, 1), "2 ranks on b see 1 GPU"),
        ((4, 1, 2, 2), "2 ranks on a see 1 GPU"),
    ],
)
def test_each_rank_needs_a_gpu_of_its_own(counts: tuple[int, ...], objection: str | None) -> None:
    assert reason_against_nccl([VisibleGpus(count) for count in counts], NODES, HOSTS) == objection


def test_a_scheduler_may_have_dealt_them_out() -> None:
    apart = [VisibleGpus(1, 11), VisibleGpus(1, 12), VisibleGpus(1, 11), VisibleGpus(1, 12)]
    assert reason_against_nccl(apart, NODES, HOSTS) is None
    alike = [VisibleGpus(1, 11), VisibleGpus(1, 12), VisibleGpus(1, 11), VisibleGpus(1, 11)]
    assert reason_against_nccl(alike, NODES, HOSTS) == "2 ranks on b see 1 GPU"
    assert (
        reason_against_nccl([VisibleGpus(1), VisibleGpus(1, 5)], (0, 0), ("a", "a"))
        == "2 ranks on a see 1 GPU"
    )
    assert reason_against_nccl([VisibleGpus(1, 7), VisibleGpus(1, 7)], (0, 1), ("a", "b")) is None


def test_masks_are_told_apart() -> None:
    loaded = modules(1, "hvdtrain.torch")
    masks = [
        find_visible_gpus(loaded, {"CUDA_VISIBLE_DEVICES": text}).mask for text in ("0", "1", "1")
    ]
    assert masks[0] != masks[1] == masks[2] != 0
    assert find_visible_gpus(loaded, {"HOME": "/"}) == VisibleGpus(1, 0)


def test_only_programs_with_torch_are_asked() -> None:
    assert find_visible_gpus(modules(4, "hvdtrain.torch"), {}) == VisibleGpus(4)
    assert find_visible_gpus(modules(4), {}) == VisibleGpus(-1)
    assert find_visible_gpus(
        modules(4, "hvdtrain.torch", "hvdtrain.tensorflow"), {}
    ) == VisibleGpus(-1)
    assert find_visible_gpus(modules(4, "hvdtrain.torch", nccl=False), {}) == VisibleGpus(-1)
    assert find_visible_gpus({}, {}) == VisibleGpus(-1)
    assert find_visible_gpus(modules(4, "hvdtrain.torch", usable=False), {}) == VisibleGpus(0)
