"""The strategies for Keras: the code that a user adds for each, and what it does otherwise."""

from __future__ import annotations

import os
from typing import Any

from hvdtrain_bench.compare.protocol import (
    JAX,
    KERAS,
    TENSORFLOW,
    Launch,
    Need,
    Place,
    RankResult,
    Strategy,
    Task,
)


def _train(task: Task, place: Place, library: str, **differences: Any) -> RankResult:
    from hvdtrain_bench.compare.keras_training import Approach, train_keras

    return train_keras(task, place, Approach(library, **differences))


def _one(task: Task, place: Place) -> RankResult:
    import keras

    return _train(task, place, f"Keras {keras.__version__} on {keras.backend.backend()}")


_HVDTRAIN = """\
import hvdtrain.keras as hvd
hvd.init()
weights = hvd.size() * counted / batch_size
optimizer = hvd.DistributedOptimizer(optimizer)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
"""


def _hvdtrain(task: Task, place: Place) -> RankResult:
    import keras

    import hvdtrain.keras as hvd
    from hvdtrain import __version__
    from hvdtrain.core import context

    hvd.init()
    sharded = task.variant == "sharded"
    exchange = None if sharded else task.variant or None
    mpi = context.current().library.partition(" (")[0]
    return _train(
        task,
        place,
        f"hvdtrain {__version__} on {mpi}, Keras on {keras.backend.backend()}",
        optimizer=lambda own: hvd.DistributedOptimizer(own, exchange=exchange, sharded=sharded),
        scale=float(place.size),
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    )


_HOROVOD = """\
import horovod.keras as hvd
hvd.init()
dataset = dataset.shard(hvd.size(), hvd.rank()).batch(batch_size // hvd.size())
steps = len(images) // batch_size
optimizer = hvd.DistributedOptimizer(optimizer)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
"""


def _horovod(task: Task, place: Place) -> RankResult:
    import horovod
    import horovod.keras as hvd

    from hvdtrain_bench.compare.keras_training import sharded_shares

    hvd.init()
    return _train(
        task,
        place,
        f"Horovod {horovod.__version__}",
        optimizer=hvd.DistributedOptimizer,
        shares=sharded_shares,
        scale=float(place.size),
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    )


_SCOPE = """\
with strategy.scope():
    model = make_model()
    model.compile(optimizer, loss)
"""


def _mirrored(task: Task, place: Place) -> RankResult:
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration() for _ in range(task.ranks)]
    tf.config.set_logical_device_configuration(cpu, devices)
    names = [f"CPU:{number}" for number in range(task.ranks)]
    return _train(
        task,
        place,
        f"TensorFlow {tf.__version__}",
        scope=tf.distribute.MirroredStrategy(names).scope,
        notes=[f"one process with {task.ranks} logical devices of the CPU"],
    )


def _multiworker(task: Task, place: Place) -> RankResult:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    return _train(task, place, f"TensorFlow {tf.__version__}", scope=strategy.scope)


_CLUSTER = """\
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    server = tf.distribute.Server(
        resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc"
    )
    server.join()
"""


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


def _ps_sync(task: Task, place: Place) -> RankResult:
    import tensorflow as tf

    _serve_unless_chief()
    replicas = tf.compat.v1.train.SyncReplicasOptimizer
    return _train(
        task,
        place,
        f"TensorFlow {tf.__version__}",
        optimizer=lambda own: replicas(own, task.ranks, task.ranks),
    )


def _ps_async(task: Task, place: Place) -> RankResult:
    import tensorflow as tf

    strategy = tf.distribute.ParameterServerStrategy(_serve_unless_chief())
    return _train(task, place, f"TensorFlow {tf.__version__}", scope=strategy.scope)


def _jax_distribution(task: Task, place: Place) -> RankResult:
    flags = f"--xla_force_host_platform_device_count={task.ranks}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    import jax
    import keras

    keras.distribution.set_distribution(keras.distribution.DataParallel())
    return _train(
        task,
        place,
        f"Keras {keras.__version__} on JAX {jax.__version__}",
        notes=[f"one process with {len(jax.devices())} devices of the CPU"],
    )


REFERENCE = Strategy("one", "one process with the whole batch", Launch.ONE, (KERAS,), "", _one)
STRATEGIES = (
    Strategy(
        "hvdtrain",
        "hvdtrain.keras; with :sharded or an exchange, such as :half:type=bf16",
        Launch.MPI,
        (KERAS,),
        _HVDTRAIN,
        _hvdtrain,
        takes_variants=True,
    ),
    Strategy(
        "horovod",
        "Horovod itself",
        Launch.MPI,
        (
            KERAS,
            Need(
                "horovod",
                "python -m hvdtrain build-horovod, or --python horovod=PATH of an environment with "
                "it",
            ),
        ),
        _HOROVOD,
        _horovod,
    ),
    Strategy(
        "mirrored",
        "tf.distribute.MirroredStrategy, in one process",
        Launch.ONE,
        (KERAS, TENSORFLOW),
        f"strategy = tf.distribute.MirroredStrategy()\n{_SCOPE}",
        _mirrored,
        backend="tensorflow",
    ),
    Strategy(
        "multiworker",
        "tf.distribute.MultiWorkerMirroredStrategy",
        Launch.PROCESSES,
        (KERAS, TENSORFLOW),
        f"strategy = tf.distribute.MultiWorkerMirroredStrategy()\n{_SCOPE}",
        _multiworker,
        backend="tensorflow",
    ),
    Strategy(
        "ps-sync",
        "tf.compat.v1.train.SyncReplicasOptimizer, with one server",
        Launch.PROCESSES,
        (KERAS, TENSORFLOW),
        f"{_CLUSTER}optimizer = tf.compat.v1.train.SyncReplicasOptimizer(optimizer, replicas, "
        "replicas)\n",
        _ps_sync,
        backend="tensorflow",
        helpers=("ps",),
    ),
    Strategy(
        "ps-async",
        "tf.distribute.ParameterServerStrategy, with one server",
        Launch.PROCESSES,
        (KERAS, TENSORFLOW),
        f"{_CLUSTER}strategy = tf.distribute.ParameterServerStrategy(resolver)\n{_SCOPE}",
        _ps_async,
        backend="tensorflow",
        helpers=("ps",),
    ),
    Strategy(
        "jax-distribution",
        "keras.distribution.DataParallel on JAX, in one process",
        Launch.ONE,
        (KERAS, JAX),
        "keras.distribution.set_distribution(keras.distribution.DataParallel())\n",
        _jax_distribution,
        backend="jax",
    ),
)
