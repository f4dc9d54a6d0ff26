"""One rank of a benchmark: python -m hvdtrain_bench.worker KIND SETTINGS THREADS FILE."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import hvdtrain.torch as hvd
from hvdtrain_bench.harness.results import write_json
from hvdtrain_bench.harness.settings import Settings
from hvdtrain_bench.harness.turns import Bench

if TYPE_CHECKING:
    from hvdtrain_bench.harness.ranks import Ranks


def main(kind: str, settings: str, threads: str, file: str) -> None:
    """Measure together with all other ranks; rank 0 writes the result into `file`."""
    framework, _, backend = kind.partition("-")
    if framework in ("tensorflow", "keras"):
        _configure_framework(backend if framework == "keras" else framework, int(threads))
    # Before mpi4py is imported, which would initialize MPI itself.
    hvd.init(engine="mpi")
    torch.set_num_threads(int(threads))
    # Horovod 0.28.1 with torch 2.13 causes warnings.
    warnings.simplefilter("ignore")

    from hvdtrain_bench.harness.ranks import Ranks

    ranks = Ranks()
    measure = _measure_framework if framework in ("tensorflow", "keras") else _measure_torch
    bench = measure(kind, ranks, Settings.from_json(settings))
    if ranks.rank == 0:
        write_json(Path(file), bench.result)


def _configure_framework(backend: str, threads: int) -> None:
    """Set what frameworks read when they are imported."""
    os.environ["KERAS_BACKEND"] = backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if backend == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(threads)
    elif threads == 1:
        os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")


def _measure_framework(kind: str, ranks: Ranks, settings: Settings) -> Bench:
    bench = Bench(kind, ranks, settings)
    if kind.startswith("tensorflow"):
        from hvdtrain_bench.cases.tensorflow_steps import measure_tensorflow

        measure_tensorflow(bench, kind == "tensorflow-strategy")
    else:
        from hvdtrain_bench.cases.keras_fits import measure_fits

        measure_fits(bench)
    return bench


def _measure_torch(kind: str, ranks: Ranks, settings: Settings) -> Bench:
    from hvdtrain_bench.cases.checkpoints import measure_checkpoints
    from hvdtrain_bench.cases.collectives import measure_collectives
    from hvdtrain_bench.cases.exchange_losses import measure_losses
    from hvdtrain_bench.cases.exchange_steps import measure_exchanges
    from hvdtrain_bench.cases.idle import measure_idle
    from hvdtrain_bench.cases.loops import measure_loops
    from hvdtrain_bench.cases.peers import Peers
    from hvdtrain_bench.cases.profile import measure_profile
    from hvdtrain_bench.cases.steps import measure_steps

    measures: dict[str, Callable[[Bench, Peers], None]] = {
        "checkpoint": measure_checkpoints,
        "collectives": measure_collectives,
        "exchange": measure_exchanges,
        "exchange-loss": measure_losses,
        "steps": measure_steps,
        "idle": measure_idle,
        "loop": measure_loops,
        "profile": measure_profile,
    }
    peers = Peers(ranks)
    bench = Bench(kind, ranks, settings, peers.nodes)
    measures[kind](bench, peers)
    peers.close()
    return bench


if __name__ == "__main__":
    main(*sys.argv[1:])
