"""The device that a rank computes on with JAX."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
from collections.abc import Mapping
from pathlib import Path

import jax

from hvdtrain.devices import Device, DeviceWish, device_index, no_gpus
from hvdtrain.topology import Topology
from hvdtrain.train.options import TrainOptions

_DRIVER = Path("/proc/driver/nvidia/gpus")


def pin_device(topology: Topology, wish: DeviceWish) -> int | None:
    """Make one GPU, or none, visible to this rank and return its index.

    Call it before anything that makes JAX look for devices, because JAX allocates memory on all of
    them. For the same reason GPUs are counted without JAX.
    """
    if wish.kind == "cpu":
        jax.config.update("jax_platforms", "cpu")
        return None
    visible = _visible_gpus(os.environ) if _has_gpu_plugin() else 0
    if visible:
        index = device_index(topology, visible, wish)
        jax.config.update("jax_cuda_visible_devices", str(index))
        return index
    if wish.kind == "cuda":
        raise no_gpus("JAX", os.environ)
    return None


def _has_gpu_plugin() -> bool:
    """Return whether JAX's plugin for NVIDIA GPUs is installed."""
    plugins = importlib.util.find_spec("jax_plugins")
    folders = plugins.submodule_search_locations if plugins is not None else None
    return any(module.name.startswith("xla_cuda") for module in pkgutil.iter_modules(folders or []))


def _visible_gpus(environ: Mapping[str, str]) -> int:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0


def prepare(topology: Topology, options: TrainOptions) -> Device:
    """Pin a device and return it; JAX cannot be limited to a share of the cores."""
    index = pin_device(topology, options.device_wish)
    if options.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    (device, *_) = jax.local_devices()
    return Device(device.platform if index is None else f"cuda:{index} ({device.device_kind})")
