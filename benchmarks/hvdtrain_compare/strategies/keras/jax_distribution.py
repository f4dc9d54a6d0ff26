"""Keras's own distribution on JAX: DataParallel over several devices of one process."""

from __future__ import annotations

import os

from hvdtrain_compare.protocol.rank_file import RankResult
from hvdtrain_compare.protocol.strategy import JAX, KERAS, Launch, Strategy
from hvdtrain_compare.protocol.task import Place, Task

_CODE = """\
keras.distribution.set_distribution(keras.distribution.DataParallel())
"""


def _train(task: Task, place: Place) -> RankResult:
    flags = f"--xla_force_host_platform_device_count={task.ranks}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    import jax
    import keras

    from hvdtrain_compare.keras.approach import Approach
    from hvdtrain_compare.keras.loop import train_keras

    keras.distribution.set_distribution(keras.distribution.DataParallel())
    approach = Approach(
        f"Keras {keras.__version__} on JAX {jax.__version__}",
        notes=[f"one process with {len(jax.devices())} devices of the CPU"],
    )
    return train_keras(task, place, approach)


STRATEGY = Strategy(
    name="jax-distribution",
    summary="keras.distribution.DataParallel on JAX, in one process",
    launch=Launch.ONE,
    needs=(KERAS, JAX),
    code=_CODE,
    train=_train,
    backend="jax",
)
