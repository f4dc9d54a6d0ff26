"""tf.distribute's MirroredStrategy: one process with a replica on each of several devices."""

from __future__ import annotations

from hvdtrain_compare.protocol.rank_file import RankResult
from hvdtrain_compare.protocol.strategy import KERAS, TENSORFLOW, Launch, Strategy
from hvdtrain_compare.protocol.task import Place, Task

_CODE = """\
strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = make_model()
    model.compile(optimizer, loss)
"""


def _train(task: Task, place: Place) -> RankResult:
    import tensorflow as tf

    from hvdtrain_compare.keras.approach import Approach
    from hvdtrain_compare.keras.loop import train_keras

    (cpu,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration() for _ in range(task.ranks)]
    tf.config.set_logical_device_configuration(cpu, devices)
    names = [f"CPU:{number}" for number in range(task.ranks)]
    strategy = tf.distribute.MirroredStrategy(names)
    approach = Approach(
        f"TensorFlow {tf.__version__}",
        scope=strategy.scope,
        notes=[f"one process with {task.ranks} logical devices of the CPU"],
    )
    return train_keras(task, place, approach)


STRATEGY = Strategy(
    name="mirrored",
    summary="tf.distribute.MirroredStrategy, in one process",
    launch=Launch.ONE,
    needs=(KERAS, TENSORFLOW),
    code=_CODE,
    train=_train,
    backend="tensorflow",
)
