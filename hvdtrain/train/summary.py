"""The summary of a run that has ended, with a digest of its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.collective import collective
from hvdtrain.core.context import Context
from hvdtrain.core.objects import allgather_object
from hvdtrain.train.loop.protocol import TrainingLoop
from hvdtrain.train.loop.step_plan import StepPlan
from hvdtrain.train.metrics.totals import Values
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.parameter_server.statistics import Pushes
from hvdtrain.train.progress import Progress
from hvdtrain.train.records.results import Seconds, Summary


@collective
def make_summary(
    step_plan: StepPlan, world: Context, progress: Progress, final: Values, loop: TrainingLoop
) -> Summary:
    """Return the summary of a run that has ended."""
    options, topology, best = step_plan.options, world.topology, progress.best
    total, communicate = progress.total_seconds, progress.communicate_seconds
    return Summary(
        world_size=topology.size,
        hosts=topology.hosts,
        host_names=list(dict.fromkeys(topology.hostnames)),
        engine=world.engine_name,
        framework=options.framework,
        exchange=options.exchange,
        global_batch_size=step_plan.global_batch_size,
        base_lr=options.base_lr,
        scaled_lr=step_plan.target_lr,
        epochs=progress.epoch,
        final=final,
        samples=progress.samples,
        samples_per_second=progress.samples / total,
        seconds=Seconds(total, total - communicate, communicate),
        weights_sha256=allgather_object(weights_digest(loop.state.weights()), "weights"),
        steps=progress.step,
        best=None if best is None else asdict(best),
        ended="early stop" if progress.epoch < options.epochs else "epochs",
        parameter_server=_parameter_server(options, loop.pushes),
    )


def _parameter_server(options: TrainOptions, pushes: Pushes | None) -> dict[str, Any] | None:
    settings = options.parameter_server
    if settings is None or pushes is None:
        return None
    given = asdict(settings)
    given["max_staleness"] = given.pop("staleness")  # pushes have counts of that name
    return {**given, **pushes.record()}


def weights_digest(weights: Mapping[str, npt.NDArray[Any]]) -> str:
    """Return the SHA-256 of all weights of this rank's model.

    It covers names, types, shapes and bytes, in the order of `weights`.
    """
    digest = hashlib.sha256()
    for name, array in weights.items():
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
