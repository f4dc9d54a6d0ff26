"""tf.distribute's MultiWorkerMirroredStrategy: one process for each worker."""

from __future__ import annotations

from hvdtrain_compare.protocol.rank_file import RankResult
from hvdtrain_compare.protocol.strategy import KERAS, TENSORFLOW, Launch, Strategy
from hvdtrain_compare.protocol.task import Place, Task

_CODE = """\
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = make_model()
    model.compile(optimizer, loss)
"""


def _train(task: Task, place: Place) -> RankResult:
    import tensorflow as tf

    from hvdtrain_compare.keras.approach import Approach
    from hvdtrain_compare.keras.loop import train_keras

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    approach = Approach(f"TensorFlow {tf.__version__}", scope=strategy.scope)
    return train_keras(task, place, approach)


STRATEGY = Strategy(
    name="multiworker",
    summary="tf.distribute.MultiWorkerMirroredStrategy",
    launch=Launch.PROCESSES,
    needs=(KERAS, TENSORFLOW),
    code=_CODE,
    train=_train,
    backend="tensorflow",
)
