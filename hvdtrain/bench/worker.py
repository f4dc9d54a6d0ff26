"""One rank of a benchmark: python -m hvdtrain.bench.worker KIND SETTINGS THREADS FILE."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import hvdtrain.torch as hvd
from hvdtrain.bench.results import Result, write_json
from hvdtrain.bench.settings import Settings

__all__ = ["main"]


def main(kind: str, settings: str, threads: str, file: str) -> None:
    """Measure together with all other ranks; rank 0 writes the result into `file`.

    Args:
        kind: what: "collectives", "steps", "idle" or "profile".
        settings: of Settings.to_json().
        threads: with which torch computes, per rank.
        file: for the result.
    """
    # Before mpi4py is imported, which would initialise MPI on its own.
    hvd.init(engine="mpi")
    torch.set_num_threads(int(threads))
    # Horovod 0.28.1 and torch 2.13 warn of each other.
    warnings.simplefilter("ignore")

    from hvdtrain.bench.peers import Peers
    from hvdtrain.bench.ranks import Ranks

    ranks = Ranks()
    peers = Peers(ranks)
    result = _measure(kind)(ranks, peers, Settings.from_json(settings), _say(kind, ranks.rank))
    if ranks.rank == 0:
        write_json(Path(file), result)
    peers.close()


def _measure(kind: str) -> Callable[..., Result]:
    from hvdtrain.bench.collectives import measure_collectives
    from hvdtrain.bench.idle import measure_idle
    from hvdtrain.bench.profile import measure_profile
    from hvdtrain.bench.steps import measure_steps

    return {
        "collectives": measure_collectives,
        "steps": measure_steps,
        "idle": measure_idle,
        "profile": measure_profile,
    }[kind]


def _say(kind: str, rank: int) -> Callable[[str], None]:
    def say(text: str) -> None:
        if rank == 0:
            print(f"  {kind}: {text}", file=sys.stderr, flush=True)

    return say


if __name__ == "__main__":
    main(*sys.argv[1:])
