"""One rank of a benchmark: python -m hvdtrain_bench.worker KIND SETTINGS THREADS FILE."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path

import torch

import hvdtrain.torch as hvd
from hvdtrain_bench.harness.results import MeasurementSettings, write_json
from hvdtrain_bench.harness.turns import Bench

# The modules of cases that measure; those of torch compare peers.
_FRAMEWORKS = {"tensorflow": "tensorflow_steps", "keras": "keras_fits"}
_CASES = {
    "checkpoint": "checkpoints",
    "collectives": "collectives",
    "exchange": "exchange_steps",
    "exchange-loss": "exchange_losses",
    "idle": "idle",
    "loop": "loops",
    "profile": "profile",
    "steps": "steps",
}


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

    bench = Bench(kind, Ranks(), MeasurementSettings.from_json(settings))
    if framework in ("tensorflow", "keras"):
        import_module(f"hvdtrain_bench.cases.{_FRAMEWORKS[framework]}").measure(bench)
    else:
        from hvdtrain_bench.cases.peers import PeerLibraries

        peers = PeerLibraries(bench.ranks)
        bench.result = replace(bench.result, nodes=peers.nodes)
        import_module(f"hvdtrain_bench.cases.{_CASES[kind]}").measure(bench, peers)
        peers.close()
    if bench.ranks.rank == 0:
        write_json(Path(file), asdict(bench.result))


def _configure_framework(backend: str, threads: int) -> None:
    """Set what frameworks read when they are imported."""
    os.environ["KERAS_BACKEND"] = backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if backend == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(threads)
    elif threads == 1:
        os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")


if __name__ == "__main__":
    main(*sys.argv[1:])
