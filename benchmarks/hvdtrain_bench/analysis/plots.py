"""Plots of the results, if matplotlib is installed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from hvdtrain_bench.analysis.judge import (
    ALONE,
    AVERAGE,
    AVERAGE_AGAIN,
    HVDTRAIN,
    HVDTRAIN_AGAIN,
    NO_COMMUNICATION,
    WHOLE,
)
from hvdtrain_bench.harness.results import Case, Result
from hvdtrain_bench.scaling.paper import StepPrediction
from hvdtrain_bench.scaling.predictions import Check

_INCHES = (9.0, 5.5)


def plot_collectives(result: Result, path: Path) -> None:
    """Plot time against size, one line per contender."""
    figure = Figure(figsize=_INCHES, layout="constrained")
    axes: Any = figure.add_subplot()
    palette = colormaps["tab20"]  # has more colors than there are contenders
    axes.set_prop_cycle(color=[palette(number) for number in range(palette.N)])
    cases = [case for case in result.cases if "mpi4py Allreduce" in case.values]
    for name in cases[0].values:
        points = [(case.about["bytes"], median(case.values[name])) for case in cases]
        style = ":" if name.startswith("memcpy") else "-"
        axes.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=name)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bytes",
        ylabel="seconds, median",
        title=f"sum of float32 over {result.ranks} ranks",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def plot_losses(result: Result, against: int, path: Path) -> None:
    """Plot medians of the losses of each task against steps (0) or seconds (1), by exchange."""
    figure = Figure((_INCHES[0], 0.8 * _INCHES[1] * len(result.cases)), layout="constrained")
    for row, case in enumerate(result.cases):
        axes = figure.add_subplot(len(result.cases), 1, row + 1)
        for name, curves in case.about["curves"].items():
            points = list(zip(*curves, strict=True))  # by point, then by seed
            places = [median(seed[against] for seed in point) for point in points]
            losses = [median(seed[2] for seed in point) for point in points]
            axes.plot(places, losses, marker="o", markersize=3, label=name)
        axes.set(
            xlabel=("steps", "seconds of training")[against],
            ylabel="test loss, median of the seeds",
            yscale="log",
            title=f"{case.name}, {result.ranks} ranks on {result.nodes} nodes",
        )
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=80)


def plot_ratios(results: Mapping[str, Result], path: Path) -> None:
    """Plot step times as multiples of the average's, one group of bars per link."""
    groups = [(name, result.cases[0]) for name, result in results.items()]
    _bars(groups, AVERAGE, (AVERAGE_AGAIN,), path)


def plot_steps(results: Sequence[Result], path: Path) -> None:
    """Plot step times as multiples of a step without communication, one group per case."""
    groups = [
        (f"{case.name}, {result.ranks} ranks", case) for result in results for case in result.cases
    ]
    _bars(groups, NO_COMMUNICATION, (ALONE, WHOLE), path)


def _bars(
    groups: Sequence[tuple[str, Case]], base: str, hidden: Collection[str], path: Path
) -> None:
    """Plot medians as multiples of the base's: an unchanged script first, then the least."""
    rows = max(len(case.values.keys() - hidden) for _, case in groups)
    figure = Figure(figsize=(_INCHES[0], (0.3 * rows + 0.6) * len(groups)), layout="constrained")
    for number, (title, case) in enumerate(groups, start=1):
        axes: Any = figure.add_subplot(len(groups), 1, number)
        times = {name: median(times) for name, times in case.values.items() if name not in hidden}
        names = sorted(times, key=lambda name: (name != HVDTRAIN, times[name]))
        ratios = [times[name] / times[base] for name in names]
        labels = [_LABELS.get(name, name) for name in names]
        bars = axes.barh(labels, ratios, color=[_color(name) for name in names])
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        axes.axvline(1.0, color="#c0c4cc", linewidth=0.8, zorder=0)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.margins(x=0.08)
    axes.set_xlabel(f"time of a step / {base}: shorter is better")
    figure.savefig(path, dpi=120)


_LABELS = {HVDTRAIN: "unchanged script", HVDTRAIN_AGAIN: "unchanged script again"}
# One of ours, and one for each library.
_COLORS = {"hvdtrain": "#3949ab", "DDP": "#e08a3c", "Horovod": "#c4514a", "replicate": "#8d6e63"}


def _color(name: str) -> str:
    library = name.partition(",")[0].removesuffix(" again")
    return _COLORS.get(library, "#9aa0ab")


def plot_scaling(
    predictions: Mapping[str, Mapping[str, Sequence[StepPrediction]]],
    checks: Sequence[Check],
    path: Path,
) -> None:
    """Plot predicted efficiency against ranks, one plot per model, one line per link."""
    figure = Figure(figsize=(_INCHES[0], 3.2 * len(predictions)), layout="constrained")
    for number, (model, links) in enumerate(predictions.items(), start=1):
        axes: Any = figure.add_subplot(len(predictions), 1, number)
        for link, found in links.items():
            ranks, shares = [p.ranks for p in found], [p.efficiency for p in found]
            axes.plot(ranks, [share.middle for share in shares], label=link)
            lows, highs = [share.low for share in shares], [share.high for share in shares]
            axes.fill_between(ranks, lows, highs, alpha=0.2)
        if points := [(c.ranks, c.efficiency) for c in checks if c.title == model]:
            axes.plot(*zip(*points, strict=True), "kx", label="measured here")
        axes.set_xscale("log", base=2)
        axes.set(xlabel="ranks", ylabel="efficiency", title=model)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
