"""What a run has come to."""

from __future__ import annotations

from dataclasses import asdict

from hvdtrain.core.context import Context
from hvdtrain.core.objects import allgather_object
from hvdtrain.train.digest import weights_digest
from hvdtrain.train.loop.protocol import Loop
from hvdtrain.train.metrics.totals import Values
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.progress import Progress
from hvdtrain.train.records.results import Seconds, Summary

__all__ = ["make_summary"]


def make_summary(
    options: TrainOptions, world: Context, progress: Progress, final: Values, loop: Loop
) -> Summary:
    """Return the summary of a run that has ended (collective).

    Args:
        options: of the run.
        world: the ranks.
        progress: at its end.
        final: the last evaluation.
        loop: with the weights.
    """
    topology, best = world.topology, progress.best
    total, communicate = progress.total_seconds, progress.communicate_seconds
    return Summary(
        world_size=topology.size,
        hosts=topology.hosts,
        host_names=list(dict.fromkeys(topology.hostnames)),
        engine=world.engine_name,
        framework=options.framework,
        global_batch_size=options.samples_per_step(topology.size),
        base_lr=options.base_lr,
        scaled_lr=options.scaled_lr(topology.size),
        epochs=progress.epoch,
        final=final,
        samples=progress.samples,
        samples_per_second=progress.samples / total,
        seconds=Seconds(total, total - communicate, communicate),
        weights_sha256=allgather_object(weights_digest(loop.state.weights()), "weights"),
        steps=progress.step,
        best=None if best is None else asdict(best),
        ended="early stop" if progress.epoch < options.epochs else "epochs",
    )
