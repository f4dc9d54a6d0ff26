"""Pinning one GPU per local rank with JAX."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
from collections.abc import Mapping
from pathlib import Path

import jax

from hvdtrain.devices import DeviceWish, device_index, no_gpus
from hvdtrain.topology import Topology

__all__ = ["pin_device"]

_DRIVER = Path("/proc/driver/nvidia/gpus")


def pin_device(topology: Topology, wish: DeviceWish) -> int | None:
    """Have this rank see one GPU of its own, or none; return its index (local).

    It must come before anything that makes JAX look for devices, since JAX would take memory of
    all of them; so GPUs are counted without it.

    Args:
        topology: the place of this rank.
        wish: what it is to take.

    Raises:
        UsageError: cuda is asked for and not there, or there are fewer GPUs than local ranks.
    """
    if wish.kind == "cpu":
        jax.config.update("jax_platforms", "cpu")
        return None
    visible = _visible_gpus(os.environ) if _takes_gpus() else 0
    if visible:
        index = device_index(topology, visible, wish)
        jax.config.update("jax_cuda_visible_devices", str(index))
        return index
    if wish.kind == "cuda":
        raise no_gpus("JAX", os.environ)
    return None


def _takes_gpus() -> bool:
    """Return whether JAX's part for NVIDIA's GPUs is installed."""
    plugins = importlib.util.find_spec("jax_plugins")
    folders = plugins.submodule_search_locations if plugins is not None else None
    return any(module.name.startswith("xla_cuda") for module in pkgutil.iter_modules(folders or []))


def _visible_gpus(environ: Mapping[str, str]) -> int:
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return len([name for name in given.split(",") if name.strip() not in ("", "-1")])
    return len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0
