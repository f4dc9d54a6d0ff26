"""Run the cases of all files named tensorflow_*_cases.py on each rank."""

from importlib import import_module

import tensorflow as tf
from all_cases import cases_of, run_all

import hvdtrain.tensorflow as hvd

# First what is settled in the first steps; new worlds come last.
NAMES = ("allocator", "join", "ops", "training", "graph", "engine", "elastic")
MODULES = [import_module(f"tensorflow_{name}_cases") for name in NAMES]


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    run_all(cases_of(*MODULES))


if __name__ == "__main__":
    main()
