"""tf.distribute's ParameterServerStrategy: a chief hands out steps, which workers take."""

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
strategy = tf.distribute.ParameterServerStrategy(resolver)
with strategy.scope():
    model = make_model()
    model.compile(optimizer, loss)
"""


def _train(task: Task, place: Place) -> RankResult:
    import tensorflow as tf

    from hvdtrain_compare.keras.approach import Approach
    from hvdtrain_compare.keras.cluster import serve_unless_chief
    from hvdtrain_compare.keras.loop import train_keras

    strategy = tf.distribute.ParameterServerStrategy(serve_unless_chief())
    approach = Approach(f"TensorFlow {tf.__version__}", scope=strategy.scope)
    return train_keras(task, place, approach)


STRATEGY = Strategy(
    name="ps-async",
    summary="tf.distribute.ParameterServerStrategy, with one server",
    launch=Launch.PROCESSES,
    needs=(KERAS, TENSORFLOW),
    code=_CODE,
    train=_train,
    backend="tensorflow",
    helpers=("ps",),
)
