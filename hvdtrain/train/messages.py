"""The lines that rank 0 prints: the header, one line per epoch, and the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain import __version__
from hvdtrain.topology import format_by_rank, format_ranks
from hvdtrain.train.metrics import Values
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.options.config_file import counted
from hvdtrain.train.progress import Progress
from hvdtrain.train.records import MetricsRecord, RanksJoined, RanksLost, Summary
from hvdtrain.train.setup import TrainingSetup


def header_lines(options: TrainOptions, setup: TrainingSetup) -> list[str]:
    """Return the lines printed at the start of a run."""
    world, samples = setup.world, setup.step_plan.samples
    size, hosts = world.topology.size, world.topology.hosts
    library = "" if world.library == "none" else f", {world.library}"
    batch = options.samples_per_step(size)
    whole = f": all {samples} training samples in one step" if batch > samples else ""
    per_rank = "" if options.global_batch_size else f" ({options.samples_per_step(1)} per rank)"
    lines = {
        "engine": f"{world.engine_name}{library}",
        "ranks": f"{size} on {hosts} host{'s' * (hosts > 1)}",
        "device": device_text(setup.devices),
        "data": f"{samples} training and {setup.test_samples} test samples",
        "batch": f"{counted(batch, 'sample')} of all ranks{per_rank}{whole}",
        "servers": _servers_text(options, size),
        "lr": _lr_text(options, size, setup),
        "buckets": world.buckets if size > 1 else "",
        "exchange": _exchange_text(options),
        "resume": setup.start.origin,
        "results": str(setup.start.directory),
    }
    title = f"hvdtrain {__version__}: training {options.recipe} with {setup.title}"
    return [title, *(f"  {name:<9}{text}" for name, text in lines.items() if text)]


def _exchange_text(options: TrainOptions) -> str:
    exchange = options.make_exchange()
    return "" if exchange is None else f"{options.exchange}. {exchange.exactness}"


def _lr_text(options: TrainOptions, size: int, setup: TrainingSetup) -> str:
    base, scaled = options.base_lr, options.scaled_lr(size)
    text = f"{scaled:.4g} = base {base:.4g} x {scaled / base:.4g} ({options.lr_scaling} scaling)"
    if base != scaled and options.warmup_epochs:
        text += f", warm-up over {counted(options.warmup_epochs, 'epoch')}"
    text += decay_text(options, options.warmup_epochs if base != scaled else 0.0)
    own = setup.recipe.optimizer is not None
    shared = ", shared by ranks" * setup.loop.shares_optimizer
    return f"{text}, {'the optimizer of the recipe' if own else options.optimizer}{shared}"


def _servers_text(options: TrainOptions, size: int) -> str:
    """Describe the ranks of a parameter server; "" without one."""
    server = options.parameter_server
    if server is None:
        return ""
    workers = options.worker_count(size)
    return f"{format_ranks(range(workers, size))}; workers: {format_ranks(range(workers))}"


def decay_text(options: TrainOptions, warmup: float) -> str:
    """Describe how the learning rate decays: ", cosine from epoch 5 on"; "" if it is constant."""
    if options.schedule == "constant":
        return ""
    if warmup >= options.epochs:
        length = counted(warmup, "epoch")
        return f", no {options.schedule}: the warm-up ({length}) takes the whole run"
    if options.schedule == "step":
        return f", step after epochs {options.milestones}"
    return f", {options.schedule} from epoch {warmup:g} on" if warmup else f", {options.schedule}"


def device_text(devices: Sequence[str]) -> str:
    """Describe the devices of all ranks: "cpu", or "ranks 0, 1: cuda:0; rank 2: cpu"."""
    if len(set(devices)) == 1:
        return devices[0] if len(devices) == 1 else f"{devices[0]} on every rank"
    return format_by_rank(devices)


def epoch_lines(lines: Sequence[MetricsRecord], epochs: int) -> list[str]:
    """Return one line for the values measured after the same step: training, test or both."""
    first = lines[0]
    width = len(str(epochs))
    epoch = int(first.epoch) if first.epoch == int(first.epoch) else round(first.epoch, 2)
    measured = "  ".join(f"{line.split} {values_text(line.values)}" for line in lines)
    return [
        f"epoch {epoch:>{width}}/{epochs}  {measured}  lr {first.lr:.4g}  "
        f"{first.samples_per_second:.0f} samples/s"
    ]


def lost_line(failure: RanksLost) -> str:
    """Return the line about ranks that ended while the others continued."""
    lost, left = format_ranks(failure.lost), counted(failure.ranks, "rank")
    step = f"step {failure.step + failure.again}"
    back = f" from step {failure.step}" if failure.again else ""
    what = f"left after {step} (SIGUSR2)" if failure.left else f"ended after {step}"
    return (
        f"{lost} {what}: training continues with {left}{back} after "
        f"{failure.seconds:.2f} s, {counted(failure.global_batch_size, 'sample')} of all ranks per "
        f"step, learning rate {failure.scaled_lr:.4g}"
    )


def joined_line(join: RanksJoined) -> str:
    """Return the line about ranks that joined the others."""
    return (
        f"{format_ranks(join.joined)} joined after step {join.step}: training continues with "
        f"{counted(join.ranks, 'rank')} after {join.seconds:.2f} s, "
        f"{counted(join.global_batch_size, 'sample')} of all ranks per step, learning rate "
        f"{join.scaled_lr:.4g}"
    )


def failure_tags(
    failures: Sequence[RanksLost], joins: Sequence[RanksJoined] = ()
) -> dict[str, str]:
    """Return tags for trackers: "lost_at_step_12" is "rank 1 ended, 2 ranks left"."""
    tags: dict[str, list[str]] = {}
    for one in failures:
        what = "left" if one.left else "ended"
        text = f"{format_ranks(one.lost)} {what}, {counted(one.ranks, 'rank')} left"
        tags.setdefault(f"lost_at_step_{one.step}", []).append(text)
    for join in joins:
        text = f"{format_ranks(join.joined)}, {counted(join.ranks, 'rank')} then"
        tags.setdefault(f"joined_at_step_{join.step}", []).append(text)
    return {name: "; ".join(texts) for name, texts in tags.items()}


def values_text(values: Values) -> str:
    """Return "loss 0.1234, accuracy 98.61%"; values that are not numbers are omitted."""
    return ", ".join(
        f"{name} {value:.2%}" if name == "accuracy" else f"{name} {value:.4f}"
        for name, value in values.items()
        if isinstance(value, (int, float))
    )


def stop_lines(rank: int, progress: Progress, directory: str) -> list[str]:
    """Return the lines printed when a run is stopped early."""
    return [
        f"rank {rank} was asked to stop: {progress.text} are done and saved",
        f"to continue, give the same command --out {directory} --resume auto",
    ]


def closing_lines(summary: Summary, directory: str, files: Sequence[str]) -> list[str]:
    """Return the lines printed at the end of a run."""
    seconds = summary.seconds
    digests = set(summary.weights_sha256)
    weights = (
        f"weights sha256 {summary.weights_sha256[0][:16]} on every rank"
        if len(digests) == 1
        else f"WARNING: the ranks ended with {len(digests)} different sets of weights"
    )
    # Metrics first, unlike elsewhere, because they are what a recipe was written for.
    final = dict(sorted(summary.final.items(), key=lambda item: item[0] == "loss"))
    measured = f"test {values_text(final)} " if final else ""
    early = ""
    if summary.ended == "early stop" and summary.best is not None:
        best = summary.best
        when = counted(float(best["epoch"]), "epoch")
        early = f", no better than {best['name']} {best['value']:.4f} after {when}"
    return [
        f"{measured}after {counted(summary.epochs, 'epoch')}{early}",
        f"{counted(summary.samples, 'sample')} in {seconds.total:.1f} s: "
        f"{summary.samples_per_second:.0f} samples/s; computing {seconds.compute:.1f} s, "
        f"communicating {seconds.communicate:.1f} s",
        weights,
        *_server_lines(summary.parameter_server),
        f"results in {directory}: {', '.join(files)}",
    ]


def _server_lines(counts: Mapping[str, Any] | None) -> list[str]:
    """Describe the gradients that a parameter server has received."""
    if counts is None:
        return []
    shards = f" of {counts['servers']} shards" if counts["servers"] > 1 else ""
    most = max(map(int, counts["staleness"]), default=0)
    applied = counted(counts["applied"], "gradient")
    return [
        f"servers applied {applied}{shards} and dropped {counts['dropped']}; "
        f"staleness {counts['mean_staleness']:.2f} updates on average, at most {most}"
    ]
