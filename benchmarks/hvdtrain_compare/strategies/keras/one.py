"""One process with the whole batch, with Keras: what the others are compared with."""

from __future__ import annotations

from hvdtrain_compare.protocol.rank_file import RankResult
from hvdtrain_compare.protocol.strategy import KERAS, Launch, Strategy
from hvdtrain_compare.protocol.task import Place, Task


def _train(task: Task, place: Place) -> RankResult:
    import keras

    from hvdtrain_compare.keras.approach import Approach
    from hvdtrain_compare.keras.loop import train_keras

    approach = Approach(f"Keras {keras.__version__} on {keras.backend.backend()}")
    return train_keras(task, place, approach)


STRATEGY = Strategy(
    name="one",
    summary="one process with the whole batch",
    launch=Launch.ONE,
    needs=(KERAS,),
    code="",
    train=_train,
)
