"""One GPU for each local rank, with lists of GPUs that are not there."""

from __future__ import annotations

import pytest

from hvdtrain.devices import (
    Device,
    DeviceWish,
    device_index,
    no_gpus,
    parse_gpu_map,
    require_own_devices,
)
from hvdtrain.errors import UsageError
from hvdtrain.topology import Topology


def places(*nodes: int) -> list[Topology]:
    hosts = [f"host{node}" for node in nodes]
    return [Topology.from_nodes(rank, nodes, hosts) for rank in range(len(nodes))]


@pytest.mark.parametrize(
    ("visible", "wish", "indices"),
    [
        (4, DeviceWish(), [0, 1, 2, 0]),
        (3, DeviceWish(), [0, 1, 2, 0]),
        (1, DeviceWish(), [0, 0, 0, 0]),  # the scheduler has given each rank its own
        (4, DeviceWish(gpu_map=(3, 2, 1, 0)), [3, 2, 1, 3]),
        (2, DeviceWish(share=True), [0, 1, 0, 0]),
        (4, DeviceWish(share=True), [0, 1, 2, 0]),
        (2, DeviceWish(gpu_map=(1, 1, 0), share=True), [1, 1, 0, 1]),
    ],
)
def test_indices(visible: int, wish: DeviceWish, indices: list[int]) -> None:
    assert [device_index(place, visible, wish) for place in places(0, 0, 0, 1)] == indices


@pytest.mark.parametrize(
    ("visible", "wish", "message"),
    [
        (2, DeviceWish(), "3 ranks on host0 but 2 GPUs: start one rank for each GPU, or use --sh"),
        (4, DeviceWish(gpu_map=(0, 1)), "--gpu-map names 2 GPUs, but host0 has 3 ranks"),
        (2, DeviceWish(gpu_map=(0, 1, 2)), "gives local rank 2 GPU 2, but host0 has 2 here"),
    ],
)
def test_what_cannot_be(visible: int, wish: DeviceWish, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        device_index(places(0, 0, 0, 1)[2], visible, wish)


def test_masks_that_hide_all_gpus() -> None:
    assert "torch sees no GPU here: use --device cpu" in str(no_gpus("torch", {"PATH": "/bin"}))
    masks = {"ROCR_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "3", "ZE_AFFINITY_MASK": ""}
    said = (
        "JAX sees no GPU here (CUDA_VISIBLE_DEVICES=3, ROCR_VISIBLE_DEVICES=3, ZE_AFFINITY_MASK=)"
    )
    assert said in str(no_gpus("JAX", masks))


def test_maps() -> None:
    assert parse_gpu_map(None) == ()
    assert parse_gpu_map("3, 2,1,0") == (3, 2, 1, 0)
    for text in ("", "0,,1", "-1", "a", "0;1", "\u00b2", "9" * 5000):
        with pytest.raises(UsageError, match="give a GPU's index for each local rank"):
            parse_gpu_map(text)


def test_ranks_with_the_same_gpu() -> None:
    cpus = [Device("cpu (1 thread)")] * 4
    require_own_devices(cpus)
    own = [Device("cuda:0 (H)", f"GPU-{number}") for number in range(3)]
    require_own_devices(own)
    # Each sees one GPU, which it calls 0, and a mask that went wrong gave two of them the same.
    with pytest.raises(UsageError, match=r"ranks 1 and 3 have the same GPU, cuda:0 \(H\), GPU-1:"):
        require_own_devices([*own, own[1]])
