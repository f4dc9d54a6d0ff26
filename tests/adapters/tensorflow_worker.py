"""Run the cases of all files named tensorflow_*_cases.py on each rank."""

from __future__ import annotations

import sys
import time

import tensorflow as tf
import tensorflow_engine_cases
import tensorflow_graph_cases
import tensorflow_ops_cases
import tensorflow_training_cases
from ranks import report

import hvdtrain.tensorflow as hvd

MODULES = (
    tensorflow_ops_cases,
    tensorflow_training_cases,
    tensorflow_graph_cases,
    tensorflow_engine_cases,
)


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    digests = {}
    cases = [case for module in MODULES for case in module.CASES]
    wanted = sys.argv[1:]
    for case in cases:
        if wanted and case.__name__ not in wanted:
            continue
        started = time.perf_counter()
        digest = case()
        if wanted and hvd.rank() == 0:
            print(f"{case.__name__}: {time.perf_counter() - started:.2f} s", flush=True)
        if digest is not None:
            digests[case.__name__] = digest
    report(cases=len(cases), payload={"cases": len(cases), "digests": digests})


if __name__ == "__main__":
    main()
