"""hvdtrain.keras, with each sample used exactly once."""

from __future__ import annotations

from hvdtrain_compare.protocol.rank_file import RankResult
from hvdtrain_compare.protocol.strategy import KERAS, Launch, Strategy
from hvdtrain_compare.protocol.task import Place, Task

_SHARDED = "sharded"
_CODE = """\
import hvdtrain.keras as hvd
hvd.init()
weights = hvd.size() * counted / batch_size
optimizer = hvd.DistributedOptimizer(optimizer)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
"""


def _train(task: Task, place: Place) -> RankResult:
    import keras

    import hvdtrain.keras as hvd
    from hvdtrain import __version__
    from hvdtrain.core import context
    from hvdtrain_compare.keras.approach import Approach
    from hvdtrain_compare.keras.loop import train_keras

    hvd.init()
    sharded = task.variant == _SHARDED
    exchange = None if sharded else task.variant or None
    mpi = context.current().library.partition(" (")[0]
    approach = Approach(
        f"hvdtrain {__version__} on {mpi}, Keras on {keras.backend.backend()}",
        optimizer=lambda own: hvd.DistributedOptimizer(own, exchange=exchange, sharded=sharded),
        scale=float(place.size),
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    )
    return train_keras(task, place, approach)


STRATEGY = Strategy(
    name="hvdtrain",
    summary="hvdtrain.keras; with :sharded or an exchange, such as :half:type=bf16",
    launch=Launch.MPI,
    needs=(KERAS,),
    code=_CODE,
    train=_train,
    takes_variants=True,
)
