"""Run the cases of all files named tensorflow_*_cases.py on each rank."""

from __future__ import annotations

import tensorflow as tf
import tensorflow_allocator_cases
import tensorflow_elastic_cases
import tensorflow_engine_cases
import tensorflow_error_cases
import tensorflow_graph_cases
import tensorflow_join_cases
import tensorflow_ops_cases
import tensorflow_training_cases
from all_cases import cases_of, run_all

import hvdtrain.tensorflow as hvd

MODULES = (
    tensorflow_allocator_cases,
    tensorflow_join_cases,
    tensorflow_ops_cases,
    tensorflow_training_cases,
    tensorflow_graph_cases,
    tensorflow_engine_cases,
    tensorflow_elastic_cases,
    tensorflow_error_cases,
)


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    run_all(cases_of(*MODULES))


if __name__ == "__main__":
    main()
