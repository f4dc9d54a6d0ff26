"""TensorFlow 1's SyncReplicasOptimizer: the only synchronous parameter server of TensorFlow."""

from __future__ import annotations

from hvdtrain_compare.protocol.rank_file import RankResult
from hvdtrain_compare.protocol.strategy import KERAS, TENSORFLOW, Launch, Strategy
from hvdtrain_compare.protocol.task import Place, Task

_CODE = """\
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    server = tf.distribute.Server(
        resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc"
    )
    server.join()
optimizer = tf.compat.v1.train.SyncReplicasOptimizer(optimizer, replicas, replicas)
"""


def _train(task: Task, place: Place) -> RankResult:
    import tensorflow as tf

    from hvdtrain_compare.keras.approach import Approach
    from hvdtrain_compare.keras.cluster import serve_unless_chief
    from hvdtrain_compare.keras.loop import train_keras

    serve_unless_chief()
    replicas = tf.compat.v1.train.SyncReplicasOptimizer
    approach = Approach(
        f"TensorFlow {tf.__version__}",
        optimizer=lambda own: replicas(own, task.ranks, task.ranks),
    )
    return train_keras(task, place, approach)


STRATEGY = Strategy(
    name="ps-sync",
    summary="tf.compat.v1.train.SyncReplicasOptimizer, with one server",
    launch=Launch.PROCESSES,
    needs=(KERAS, TENSORFLOW),
    code=_CODE,
    train=_train,
    backend="tensorflow",
    helpers=("ps",),
)
