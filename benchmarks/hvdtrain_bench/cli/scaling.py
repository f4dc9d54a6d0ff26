"""`hvdtrain bench scaling`: predict steps on up to 4,096 ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import click

from hvdtrain.config import DEFAULT_BUCKET_BYTES, Config
from hvdtrain.errors import UsageError
from hvdtrain_bench.cli.options import (
    BenchOptions,
    benchmark_options,
    exchanges_option,
    models_option,
    require_exchanges,
    run_suite,
)
from hvdtrain_bench.harness.settings import SHARDED, period_of
from hvdtrain_bench.scaling.paper import Work, even_work
from hvdtrain_bench.scaling.scheme import PRESETS, Link
from hvdtrain_bench.suite import Paper

_HERE = "here"
_ALIKE, _PERIODIC = ("half", "nbit", "powersgd", "topk"), ("local",)
_BEGINNINGS = ("warmup", "distributed_after")
_LINKS = click.Choice([_HERE, *PRESETS])


@click.command("scaling")
@benchmark_options
@models_option()
@click.option("links", "--link", multiple=True, type=_LINKS, help="Instead of all; see --model.")
@exchanges_option("Also with this exchange; see `hvdtrain exchanges`.")
@click.option("--sharded", is_flag=True, help="Also with ranks that share the optimizer's work.")
@click.option("--trees", is_flag=True, help="On links that are not measured, reduce as NCCL.")
@click.option("--latency-us", type=float, help="Latency of a link of your own, in microseconds.")
@click.option("--gigabytes", type=float, help="Bandwidth of this link, in GB per second.")
@click.option("--ranks-per-node", default=1, show_default=True, help="Ranks per network card.")
@click.option("--node-link", type=_LINKS, default=_HERE, help="Link within a node.")
@click.option("--jitter-ms", type=float, help="Variation between ranks.  [default: measured]")
@click.option("--forward-ms", type=float, help="Forward pass of a step of your own, and ...")
@click.option("--backward-ms", type=float, help="... its backward pass, and ...")
@click.option("--optimizer-ms", type=float, help="... its optimizer, and ...")
@click.option("--megabytes", type=float, help="... its gradients.")
def scaling(
    options: BenchOptions,
    models: tuple[str, ...],
    links: tuple[str, ...],
    exchanges: tuple[str, ...],
    sharded: bool,
    trees: bool,
    latency_us: float | None,
    gigabytes: float | None,
    ranks_per_node: int,
    node_link: str,
    jitter_ms: float | None,
    forward_ms: float | None,
    backward_ms: float | None,
    optimizer_ms: float | None,
    megabytes: float | None,
) -> int:
    """Predict steps on 1 to 4,096 ranks on paper, in intervals that contain 90 %.

    Latency, bandwidth, phases of a step and differences between ranks are measured, with their
    spread. Steps on 2, 4, ... ranks up to -np are measured, too, and compared with predictions.
    """
    named: list[Link | None] = [PRESETS.get(name) for name in links]
    own = _own_link(latency_us, gigabytes)
    all_links = [*named, *([own] if own is not None else [])] or list(Paper.links)
    _require_predicted(exchanges)
    if ranks_per_node < 1:
        raise UsageError(f"--ranks-per-node {ranks_per_node} must be at least 1")
    if jitter_ms is not None and jitter_ms < 0:
        raise UsageError(f"--jitter-ms {jitter_ms:g} must not be negative")
    paper = Paper(
        links=tuple(_with_trees(link, trees) for link in all_links),
        schemes=(*dict.fromkeys(exchanges), *([SHARDED] if sharded else [])),
        works=_own_work((forward_ms, backward_ms, optimizer_ms), megabytes),
        ranks_per_node=ranks_per_node,
        node=_with_trees(PRESETS.get(node_link), trees),
        jitter_seconds=None if jitter_ms is None else jitter_ms / 1e3,
    )
    return run_suite(lambda suite: suite.scaling(paper), options, models=models)


def _require_predicted(exchanges: Sequence[str]) -> None:
    """Check that exchanges are of those whose steps are alike, or come in periods."""
    require_exchanges(exchanges)
    for text in exchanges:
        name, _, options = text.partition(":")
        periodic = name in _PERIODIC and period_of(text) > 1
        if not (name in _ALIKE or periodic) or any(word in options for word in _BEGINNINGS):
            raise UsageError(
                f"--exchange {text}: predicted are {', '.join(_ALIKE)} and local with steps of at "
                "least 2, without averages before them"
            )


def _with_trees(link: Link | None, trees: bool) -> Link | None:
    return link and replace(link, trees=link.trees or trees)


def _own_link(latency_us: float | None, gigabytes: float | None) -> Link | None:
    """Return the link that the user describes, or None."""
    if latency_us is None and gigabytes is None:
        return None
    if latency_us is None or gigabytes is None:
        raise UsageError("a link needs both --latency-us and --gigabytes")
    if latency_us < 0 or gigabytes <= 0:
        raise UsageError(
            f"--latency-us must be 0 or more and --gigabytes positive, got {latency_us:g} "
            f"and {gigabytes:g}"
        )
    return Link("given", latency_us / 1e6, gigabytes * 1e9)


def _own_work(phases_ms: Sequence[float | None], megabytes: float | None) -> tuple[Work, ...]:
    """Return the step that the user describes, if any."""
    figures = (*phases_ms, megabytes)
    if all(value is None for value in figures):
        return ()
    known = [value for value in figures if value is not None and value >= 0]
    if len(known) < len(figures) or not sum(known[:-1]):
        raise UsageError(
            "a step of your own needs --forward-ms, --backward-ms, --optimizer-ms and --megabytes, "
            "none of them negative"
        )
    forward_ms, backward_ms, optimizer_ms, size = known
    config = Config.from_environ(os.environ)
    seconds = (forward_ms / 1e3, backward_ms / 1e3, optimizer_ms / 1e3)
    title = f"a step of your own, {size:g} MB"
    bucket_bytes = config.bucket_bytes or DEFAULT_BUCKET_BYTES
    return (even_work(title, seconds, int(size * 1e6), bucket_bytes, config.first_bucket_bytes),)
