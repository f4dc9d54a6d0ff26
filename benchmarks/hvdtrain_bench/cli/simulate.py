"""`bench simulate`: agreement, stall watch and recovery on many ranks, in one process."""

from __future__ import annotations

from collections.abc import Sequence

import click

from hvdtrain_bench.harness.text import console, table_of, time_text
from hvdtrain_bench.scaling.paper import PRESETS, Cluster, Link
from hvdtrain_bench.scaling.simulation import SCENARIOS, Found

_NODE = Link("shared memory", 0.5e-6, 10e9)
_RANKS = (10, 100, 1000, 10000)
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


@click.command("simulate")
@click.option("sizes", "-np", "-n", "--num-ranks", type=click.IntRange(3), multiple=True)
@click.option("--link", type=click.Choice(list(PRESETS)), default="hdr", show_default=True)
@click.option("--ranks-per-node", type=click.IntRange(1), default=8, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, help="Of the jitter.")
def simulate(sizes: Sequence[int], link: str, ranks_per_node: int, seed: int) -> None:
    """Simulate what ranks agree on, with hvdtrain's own code, at 10 to 10,000 ranks.

    For each: votes, bytes that each rank receives in them and in reports and tensors, and the time
    from when the last rank begins to when the last one has ended.
    """
    cluster = Cluster(PRESETS[link], _NODE, ranks_per_node)
    chosen = sizes or _RANKS
    title = f"{PRESETS[link].name}, {ranks_per_node} ranks per node"
    rows = (
        (name, *(_cell(scenario(cluster, size, seed)) for size in chosen))
        for name, scenario in SCENARIOS.items()
    )
    console().print(table_of(title, ["ranks", *(f"{size:,}" for size in chosen)], rows))


def _cell(found: Found) -> str:
    unit, size = next(one for one in _UNITS if found.nbytes >= one[1])
    votes = f"{found.votes} vote{'s' * (found.votes != 1)}"
    return f"{votes}\n{found.nbytes / size:.3g} {unit}\n{time_text(found.seconds)}"
