"""Horovod itself with Keras, with tf.data's shard() as in its examples."""

from __future__ import annotations

from hvdtrain_compare.protocol.rank_file import RankResult
from hvdtrain_compare.protocol.strategy import KERAS, Launch, Need, Strategy
from hvdtrain_compare.protocol.task import Place, Task

_CODE = """\
import horovod.keras as hvd
hvd.init()
dataset = dataset.shard(hvd.size(), hvd.rank()).batch(batch_size // hvd.size())
steps = len(images) // batch_size
optimizer = hvd.DistributedOptimizer(optimizer)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
"""


def _train(task: Task, place: Place) -> RankResult:
    import horovod
    import horovod.keras as hvd

    from hvdtrain_compare.keras.approach import Approach, sharded_shares
    from hvdtrain_compare.keras.loop import train_keras

    hvd.init()
    approach = Approach(
        f"Horovod {horovod.__version__}",
        optimizer=hvd.DistributedOptimizer,
        shares=sharded_shares,
        scale=float(place.size),
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    )
    return train_keras(task, place, approach)


STRATEGY = Strategy(
    name="horovod",
    summary="Horovod itself",
    launch=Launch.MPI,
    needs=(
        KERAS,
        Need(
            "horovod",
            "python -m hvdtrain build-horovod, or --python horovod=PATH of an environment with it",
        ),
    ),
    code=_CODE,
    train=_train,
)
