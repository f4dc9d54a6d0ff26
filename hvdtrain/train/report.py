"""What rank 0 tells a person: the header, a line per epoch, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain import __version__
from hvdtrain.core.context import Context
from hvdtrain.data.dataset import Dataset
from hvdtrain.train.agree import by_rank
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.progress import Progress
from hvdtrain.train.results import Metrics, Summary

__all__ = ["closing_lines", "device_text", "epoch_line", "header_lines", "stop_lines"]


def header_lines(
    options: TrainOptions,
    framework: str,
    world: Context,
    data: Dataset,
    devices: Sequence[str],
    origin: str,
    directory: str,
) -> list[str]:
    """Return the lines that begin a run.

    Args:
        options: of the run.
        framework: its title.
        world: the ranks.
        data: the samples.
        devices: the device of every rank, by rank.
        origin: which checkpoint it goes on from; empty: it starts anew.
        directory: for results.
    """
    size, hosts = world.topology.size, world.topology.hosts
    library = "" if world.library == "none" else f", {world.library}"
    per_rank = "" if options.global_batch_size else f" ({options.samples_per_step(1)} per rank)"
    lines = {
        "engine": f"{world.engine_name}{library}",
        "ranks": f"{size} on {hosts} host{'s' * (hosts > 1)}",
        "device": device_text(devices),
        "data": f"{len(data.train)} training and {len(data.test)} test samples",
        "batch": f"{options.samples_per_step(size)} samples of all ranks{per_rank}",
        "lr": _lr_text(options, size),
        "buckets": world.buckets if size > 1 else "",
        "resume": origin,
        "results": directory,
    }
    title = f"hvdtrain {__version__}: training {options.recipe} with {framework}"
    return [title, *(f"  {name:<8}{text}" for name, text in lines.items() if text)]


def _lr_text(options: TrainOptions, size: int) -> str:
    base, scaled = options.base_lr, options.scaled_lr(size)
    text = f"{scaled:.4g} = base {base:.4g} x {scaled / base:.4g} ({options.lr_scaling} scaling)"
    if base != scaled and options.warmup_epochs:
        text += f", warm-up over {options.warmup_epochs:g} epochs"
    return f"{text}, {options.optimizer}"


def device_text(devices: Sequence[str]) -> str:
    """Describe the devices of all ranks: "cpu", or "ranks 0-1: cuda:0, rank 2: cpu"."""
    if len(set(devices)) == 1:
        return devices[0] if len(devices) == 1 else f"{devices[0]} on every rank"
    return by_rank(devices)


def epoch_line(train: Metrics, test: Metrics, epochs: int) -> str:
    """Return the line of one epoch."""
    return (
        f"epoch {train.epoch:>{len(str(epochs))}}/{epochs}  "
        f"train loss {train.loss:.4f}, accuracy {train.accuracy:.2%}  "
        f"test loss {test.loss:.4f}, accuracy {test.accuracy:.2%}  "
        f"lr {train.lr:.4g}  {train.samples_per_second:.0f} samples/s"
    )


def stop_lines(rank: int, progress: Progress, directory: str) -> list[str]:
    """Return the lines that end a run before its time.

    Args:
        rank: the first one that was asked to stop.
        progress: what is in the last checkpoint.
        directory: with results.
    """
    part = f" and {progress.part.samples} samples" if progress.part.samples else ""
    return [
        f"rank {rank} was asked to stop: {progress.epoch} epochs{part} are done and saved",
        f"to go on, give the same command --out {directory} --resume auto",
    ]


def closing_lines(summary: Summary, directory: str, files: Sequence[str]) -> list[str]:
    """Return the lines that end a run."""
    seconds = summary.seconds
    digests = set(summary.weights_sha256)
    weights = (
        f"weights sha256 {summary.weights_sha256[0][:16]} on every rank"
        if len(digests) == 1
        else f"WARNING: the ranks ended with {len(digests)} different sets of weights"
    )
    return [
        f"test accuracy {summary.final.accuracy:.2%}, loss {summary.final.loss:.4f} "
        f"after {summary.epochs} epochs",
        f"{summary.samples} samples in {seconds.total:.1f} s: "
        f"{summary.samples_per_second:.0f} samples/s; computing {seconds.compute:.1f} s, "
        f"communicating {seconds.communicate:.1f} s",
        weights,
        f"results in {directory}: {', '.join(files)}",
    ]
