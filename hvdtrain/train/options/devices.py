"""Options for devices and the engine."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.devices import DeviceWish, parse_gpu_map
from hvdtrain.engines import registry
from hvdtrain.train.options.declare import OptionGroup, option

ENGINES = ("auto", *registry.ENGINES)
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(OptionGroup):
    """Options for devices and the engine."""

    title = "Devices"

    engine: str = option(
        "auto",
        "Library that communicates, see docs/engines.md; auto: nccl if each rank has a GPU, "
        "otherwise mpi, or gloo under torchrun.",
        choices=ENGINES,
    )
    device: str = option(
        "auto", "cuda: one GPU for each local rank; auto: GPUs if there are any.", choices=DEVICES
    )
    gpu_map: str | None = option(
        None,
        "GPU of each local rank, such as 3,2,1,0.",
        metavar="I,J,...",
        unset="the local rank",
    )
    share_gpus: bool = option(False, "Let several ranks use the same GPU.")

    def check(self) -> None:
        """Check that the options of this group go together."""
        parse_gpu_map(self.gpu_map)

    @property
    def device_wish(self) -> DeviceWish:
        """The device that a rank is to compute on."""
        return DeviceWish(self.device, parse_gpu_map(self.gpu_map), self.share_gpus)
