"""What each strategy for Keras does otherwise than one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from hvdtrain_bench.compare.protocol import ContenderTask, ProcessPlace, RankResult

# Imports of frameworks are in the functions: some read variables that are set before.
_Differences = dict[str, Any]  # the arguments of Approach


def _one(task: ContenderTask, place: ProcessPlace) -> _Differences:
    import keras

    return {"library": f"Keras {keras.__version__} on {keras.backend.backend()}"}


def _hvdtrain(task: ContenderTask, place: ProcessPlace) -> _Differences:
    import keras

    import hvdtrain.keras as hvd
    from hvdtrain import __version__
    from hvdtrain.core import context

    hvd.init()
    sharded = task.variant == "sharded"
    exchange = None if sharded else task.variant or None
    mpi = context.current().library.partition(" (")[0]
    return {
        "library": f"hvdtrain {__version__} on {mpi}, Keras on {keras.backend.backend()}",
        "optimizer": lambda own: hvd.DistributedOptimizer(own, exchange=exchange, sharded=sharded),
        "scale": float(place.size),
        "callbacks": [hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    }


def _horovod(task: ContenderTask, place: ProcessPlace) -> _Differences:
    import horovod
    import horovod.keras as hvd

    from hvdtrain_bench.compare.meters import ShardedDivision

    hvd.init()
    return {
        "library": f"Horovod {horovod.__version__}",
        "optimizer": hvd.DistributedOptimizer,
        "division": ShardedDivision,
        "scale": float(place.size),
        "callbacks": [hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    }


def _mirrored(task: ContenderTask, place: ProcessPlace) -> _Differences:
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration() for _ in range(task.ranks)]
    tf.config.set_logical_device_configuration(cpu, devices)
    names = [f"CPU:{number}" for number in range(task.ranks)]
    return {
        "library": f"TensorFlow {tf.__version__}",
        "scope": tf.distribute.MirroredStrategy(names).scope,
        "notes": [f"one process with {task.ranks} logical devices of the CPU"],
    }


def _multiworker(task: ContenderTask, place: ProcessPlace) -> _Differences:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    return {"library": f"TensorFlow {tf.__version__}", "scope": strategy.scope}


def _serve_unless_chief() -> Any:
    """Return the cluster on its chief; serve it on workers and servers, until the job is ended."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        server = tf.distribute.Server(
            resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc"
        )
        server.join()
    return resolver


def _ps_sync(task: ContenderTask, place: ProcessPlace) -> _Differences:
    import tensorflow as tf

    _serve_unless_chief()
    replicas = tf.compat.v1.train.SyncReplicasOptimizer
    return {
        "library": f"TensorFlow {tf.__version__}",
        "optimizer": lambda own: replicas(own, task.ranks, task.ranks),
    }


def _ps_async(task: ContenderTask, place: ProcessPlace) -> _Differences:
    import tensorflow as tf

    strategy = tf.distribute.ParameterServerStrategy(_serve_unless_chief())
    return {"library": f"TensorFlow {tf.__version__}", "scope": strategy.scope}


def _jax_distribution(task: ContenderTask, place: ProcessPlace) -> _Differences:
    flags = f"--xla_force_host_platform_device_count={task.ranks}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    import jax
    import keras

    keras.distribution.set_distribution(keras.distribution.DataParallel())
    return {
        "library": f"Keras {keras.__version__} on JAX {jax.__version__}",
        "notes": [f"one process with {len(jax.devices())} devices of the CPU"],
    }


_WAYS: Mapping[str, Callable[[ContenderTask, ProcessPlace], _Differences]] = {
    "one": _one,
    "hvdtrain": _hvdtrain,
    "horovod": _horovod,
    "mirrored": _mirrored,
    "multiworker": _multiworker,
    "ps-sync": _ps_sync,
    "ps-async": _ps_async,
    "jax-distribution": _jax_distribution,
}


def train(task: ContenderTask, place: ProcessPlace) -> RankResult:
    differences = _WAYS[task.strategy](task, place)

    from hvdtrain_bench.compare.keras_training import Approach, train_keras

    return train_keras(task, place, Approach(**differences))
