"""Run the cases of all files named keras_*_cases.py on each rank, on the backend of the test."""

from __future__ import annotations

import os
import sys
from typing import Any

import keras
import keras_callback_cases
import keras_data_cases
import keras_elastic_cases
import keras_exchange_cases
import keras_fit_cases
import keras_optimizer_cases
import keras_sample_cases
import keras_save_cases
import keras_sharded_cases
import keras_synchronization_cases
import keras_training_cases
import keras_unwrapped_cases
import keras_weight_cases
from all_cases import cases_of, run_all

import hvdtrain.keras as hvd

MODULES = (
    keras_exchange_cases,  # first: it says what nodes there are when that is settled
    keras_weight_cases,
    keras_sample_cases,
    keras_save_cases,
    keras_sharded_cases,
    keras_optimizer_cases,
    keras_fit_cases,
    keras_callback_cases,
    keras_synchronization_cases,
    keras_data_cases,
    keras_elastic_cases,
    keras_training_cases,
    keras_unwrapped_cases,
)
ONLY_ON_TENSORFLOW = {
    keras_exchange_cases.a_rank_begins_without_dense_gradients,
    keras_optimizer_cases.options_mean_the_same_on_one_rank,
    keras_optimizer_cases.sparse_gradients_of_some_ranks,
}
SHARED = {*cases_of(keras_sharded_cases)} - {keras_sharded_cases.what_cannot_be_shared_is_refused}
NOT_ON = {
    "torch": ONLY_ON_TENSORFLOW | {keras_optimizer_cases.traced_reductions},
    "jax": ONLY_ON_TENSORFLOW | SHARED,
    # What they show is the same on all backends, and to trace their models takes a third of the
    # time.
    "tensorflow": {
        keras_callback_cases.learning_rates_follow_the_formulas,
        keras_callback_cases.metrics_of_different_forms_are_refused_on_all_ranks,
        keras_callback_cases.what_cannot_work_is_refused_at_the_start,
        keras_data_cases.the_loop_of_the_data_page,
        keras_optimizer_cases.traced_reductions,
        keras_synchronization_cases.what_cannot_work_is_refused_on_all_ranks,
        keras_training_cases.metrics_count_every_sample_of_all_ranks_once,
        *cases_of(keras_save_cases, keras_unwrapped_cases),
    },
}


def hooked() -> list[bool]:
    """Return for compile and fit of Keras's models whether they are hvdtrain's."""
    methods: list[Any] = [keras.Model.compile, keras.Model.fit]
    return [method.__globals__["__name__"].startswith("hvdtrain.") for method in methods]


def main() -> None:
    assert hooked() == [False, False]  # after `import hvdtrain.keras`
    if "hooks" in sys.argv:
        hvd.DistributedOptimizer(keras.optimizers.SGD())
        assert hooked() == [True, True]
    hvd.init()
    assert hooked() == [True, True]
    if keras.backend.backend() == "jax":  # whose one thread then must not wait for another
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[hvd.rank() % len(cpus)]})
    cases = cases_of(*MODULES)
    if not {*sys.argv[1:]} - {"hooks"}:
        cases = [case for case in cases if case not in NOT_ON[keras.backend.backend()]]
    run_all(cases, lambda: keras.utils.set_random_seed(1))


if __name__ == "__main__":
    main()
