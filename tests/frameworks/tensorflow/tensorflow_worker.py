"""Run the cases of all files named tensorflow_*_cases.py on each rank."""

from __future__ import annotations

import sys
import time

import tensorflow as tf
import tensorflow_allocator_cases
import tensorflow_data_cases
import tensorflow_elastic_cases
import tensorflow_engine_cases
import tensorflow_error_cases
import tensorflow_graph_cases
import tensorflow_join_cases
import tensorflow_ops_cases
import tensorflow_training_cases
from ranks import report

import hvdtrain.tensorflow as hvd
from hvdtrain.core import context

MODULES = (
    tensorflow_allocator_cases,
    tensorflow_join_cases,
    tensorflow_ops_cases,
    tensorflow_training_cases,
    tensorflow_graph_cases,
    tensorflow_data_cases,
    tensorflow_engine_cases,
    tensorflow_elastic_cases,
    tensorflow_error_cases,
)


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    engine = context.current().engine_name
    digests = {}
    wanted = sys.argv[1:]
    cases = [
        case for module in MODULES for case in module.CASES if not wanted or case.__name__ in wanted
    ]
    for case in cases:
        started = time.perf_counter()
        digest = case()
        if wanted and hvd.rank() == 0:
            print(f"{case.__name__}: {time.perf_counter() - started:.2f} s", flush=True)
        if digest is not None:
            digests[case.__name__] = digest
    report(cases=len(cases), payload={"engine": engine, "cases": len(cases), "digests": digests})


if __name__ == "__main__":
    main()
