"""One process with the whole batch, with Keras: what the others are compared with."""

from __future__ import annotations

from hvdtrain.compare.protocol.rank_file import RankResult
from hvdtrain.compare.protocol.strategy import KERAS, Launch, Strategy
from hvdtrain.compare.protocol.task import Place, Task


def _train(task: Task, place: Place) -> RankResult:
    import keras

    from hvdtrain.compare.keras.approach import Approach
    from hvdtrain.compare.keras.loop import train_keras

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
