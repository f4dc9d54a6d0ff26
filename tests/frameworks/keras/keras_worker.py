"""Run the cases of all files named keras_*_cases.py on each rank, on the backend of the test."""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import keras
from all_cases import cases_of, run_all

import hvdtrain.keras as hvd

NAMES = {path.stem for path in Path(__file__).parent.glob("keras_*_cases.py")}
FIRST = "keras_exchange_cases"  # which says what nodes there are when that is settled
CASES = cases_of(*map(import_module, [FIRST, *sorted(NAMES - {FIRST})]))
ONLY_ON_TENSORFLOW = {
    "a_function_that_is_traced_again_has_another_optimizer",
    "a_rank_begins_without_dense_gradients",
    "decayed_weights_are_not_told_to_differ",
    "fits_saves_and_loads_are_the_same",
    "keras_takes_the_steps_of_what_does_not_suit",
    "options_mean_the_same_on_one_rank",
    "sparse_gradients_of_some_ranks",
    "steps_have_the_bits_of_keras",
}
NOT_ON = {
    "torch": {*ONLY_ON_TENSORFLOW, "traced_reductions"},
    "jax": {
        *ONLY_ON_TENSORFLOW,
        "kept_tensors_stay_what_they_are",
        "one_rank_saves_and_all_go_on",
        "ranks_without_the_same_gradients",
        "shared_steps_are_those_of_one_rank",
        "velocities_are_scaled_when_no_rank_reads_them",
    },
    # What they show is the same on all backends, and to trace their models takes a third of the
    # time.
    "tensorflow": {
        *("drifted_weights_are_not_saved", "learning_rates_follow_the_formulas"),
        "metrics_count_every_sample_of_all_ranks_once",
        *("metrics_of_different_forms_are_refused_on_all_ranks", "plain_optimizers_are_warned_of"),
        *("saves_in_an_epoch_show_averaged_weights", "the_loop_of_the_data_page"),
        *("traced_reductions", "weights_that_differ_are_told"),
        *("what_cannot_work_is_refused_at_the_start", "what_cannot_work_is_refused_on_all_ranks"),
        "what_may_be_right_is_not_warned_of",
    },
}


def hooked() -> list[bool]:
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
    cases = CASES
    if not {*sys.argv[1:]} - {"hooks"}:
        cases = [case for case in CASES if case.__name__ not in NOT_ON[keras.backend.backend()]]
    run_all(cases, lambda: keras.utils.set_random_seed(1))


if __name__ == "__main__":
    main()
