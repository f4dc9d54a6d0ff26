"""Training with Keras on its backends tensorflow, torch and jax, and their devices."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path

import keras

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.data.sampling import seed_generators
from hvdtrain.devices import Device, DeviceWish, device_index, no_gpus, thread_share, threads_text
from hvdtrain.errors import UsageError
from hvdtrain.topology import Topology
from hvdtrain.train.keras.fit import require_adding_metrics
from hvdtrain.train.keras.loop import KerasLoop
from hvdtrain.train.keras.served_loop import ServedKerasLoop
from hvdtrain.train.loop.protocol import Framework
from hvdtrain.train.loop.step_plan import StepPlan
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe import Recipe

# The devices that TensorFlow has been given.
_prepared: list[Device] = []
_LARGEST_SEED = 2**32


def _prepare_tensorflow(topology: Topology, options: TrainOptions) -> Device:
    import tensorflow as tf

    index = pin_tensorflow(topology, options.device_wish)
    threads = thread_share(topology)
    if threads is None:  # TensorFlow itself ignores the variable that the user has set
        text = os.environ["OMP_NUM_THREADS"]
        threads = int(text) if text.isdecimal() else 0
    threading = tf.config.threading
    if threads and threads != threading.get_intra_op_parallelism_threads():
        threading.set_intra_op_parallelism_threads(threads)
    if index is None:
        return Device(threads_text(threads or len(os.sched_getaffinity(0))))
    (gpu,) = tf.config.get_visible_devices("GPU")
    name = tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")
    return Device(f"cuda:{index} ({name})")


def pin_tensorflow(topology: Topology, wish: DeviceWish) -> int | None:
    """Make one GPU, or none, visible to this rank and return its index.

    Call it before anything that initializes GPUs.
    """
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if wish.kind == "cpu" or (wish.kind == "auto" and not gpus):
        tf.config.set_visible_devices([], "GPU")
        return None
    if not gpus:
        raise no_gpus("TensorFlow", os.environ)
    index = device_index(topology, len(gpus), wish)
    tf.config.set_visible_devices(gpus[index], "GPU")
    return index


def _prepare_jax(topology: Topology, options: TrainOptions) -> Device:
    import jax

    index = pin_jax(topology, options.device_wish)
    if options.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    (device, *_) = jax.local_devices()
    return Device(device.platform if index is None else f"cuda:{index} ({device.device_kind})")


def pin_jax(topology: Topology, wish: DeviceWish) -> int | None:
    """Make one GPU, or none, visible to this rank and return its index.

    Call it before anything that makes JAX look for devices, because JAX allocates memory on all of
    them. For the same reason GPUs are counted without JAX.
    """
    import jax

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
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else 0


class KerasFramework(Framework):
    """Trains with `compile` and `fit` of Keras."""

    tensor_library = "np"

    def __init__(self, options: TrainOptions) -> None:
        super().__init__(options)
        self._backend = keras.backend.backend()
        if options.backend not in (None, self._backend):
            raise UsageError(
                f"--backend {options.backend}: Keras is already imported, with backend "
                f"{self._backend}: set KERAS_BACKEND={options.backend} before it is imported"
            )
        self._device = Device("")
        self.title = f"keras on {self._backend}"

    def prepare(self, topology: Topology) -> None:
        match self._backend:
            case "jax":  # which cannot be limited to a share of the cores
                self._device = _prepare_jax(topology, self._options)
            case "tensorflow":
                # It has begun where ranks were lost: the others then keep what they have.
                if not (context.current().changed and _prepared):
                    _prepared.append(_prepare_tensorflow(topology, self._options))
                self._device = _prepared[-1]
            case _:
                from hvdtrain.train.torch import device

                self._device = device.prepare(topology, self._options)

    def build(self, make_recipe: Callable[[], Recipe], topology: Topology) -> Recipe:
        options = self._options
        # Checkpoints identify variables by paths, which contain a count of the process's layers.
        keras.utils.clear_session(free_memory=False)
        keras.config.set_floatx(options.dtype)
        policy = "mixed_bfloat16" if options.amp == "bf16" else options.dtype
        keras.config.set_dtype_policy(policy)
        seed = options.seed + topology.rank
        keras.utils.set_random_seed(seed % _LARGEST_SEED)
        seed_generators(seed)
        recipe = make_recipe()
        wanted = {"model": keras.Model, "loss": keras.losses.Loss}
        for part, kind in wanted.items():
            found = getattr(recipe, part)
            if not isinstance(found, kind):
                raise UsageError(
                    f"the {part} of {options.recipe} is a {type(found).__name__}, not a "
                    f"keras.{kind.__name__}: for a {part} of torch, add --framework torch"
                )
        require_adding_metrics(recipe.metrics)
        return recipe

    def device(self) -> Device:
        return self._device

    @collective
    def make_loop(self, recipe: Recipe, step_plan: StepPlan) -> KerasLoop:
        server = self._options.parameter_server
        if server is not None:
            return ServedKerasLoop(recipe, step_plan, server)
        return KerasLoop(recipe, step_plan)
