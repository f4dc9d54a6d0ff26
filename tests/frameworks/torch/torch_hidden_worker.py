"""hvdtrain.torch on memory that the host cannot read: the cases of other workers, there.

Arguments: "operations", "optimizers", "exchanges" or "sharded", or several in a row, as
operations+optimizers; then "staged" to have hvdtrain stage what the engine takes as it is.
"""

import sys
from importlib import import_module

import torch
from all_cases import cases_of
from hidden_device import allowed, refusals
from hidden_engine import make_known
from hidden_memory import DEVICE
from ranks import report

import hvdtrain.torch as hvd
from hvdtrain.streams import HOST
from hvdtrain.torch import buckets
from hvdtrain.torch.operations import routes as torch_routes

# torch has no sparse tensors on such a device, loses the sign of an imaginary part, does not
# compile for it, and ends the process when a hook raises. Splits in a tensor must be read, whether
# a step was finite, the norm in the loop of train, what is pickled or saved, losses of closures.
# Halves stay halves on engine mpi only.
LEFT_OUT = {
    *("two_backwards_without_a_step", "a_script_makes_its_tensors_elsewhere"),
    "sparse_gradients_for_an_optimizer_that_takes_no_others",
    *("sparse_gradients_are_summed_as_dense_ones_are", "layouts_that_differ_between_ranks"),
    "sparse_gradients_are_weighted_by_samples",
    "sparse_gradients_outside_a_process_set_are_made_dense",
    "gradients_lie_in_engine_memory",
    "closures_on_data_that_differ_between_ranks",
    "a_closure_of_a_foreign_optimizer_drops_gradients_of_another_sample_weight",
    "a_closure_gives_its_own_loss_where_nothing_depends_on_it",
    *("process_sets_that_are_lists", "arguments_that_make_no_sense", "sparse"),
    "alltoall",
    "a_backward_that_a_signal_ends_leaves_no_thread_and_no_wait_behind",
    "a_gradient_that_finds_no_room_is_taken_at_the_step",
    *("what_codes_cannot_hold_does_not_stay", "codes_of_weights_keep_what_they_lose"),
    *("the_state_of_all_ranks_needs_all_of_them", "ranks_of_a_node_compress_if_told_to"),
    *("a_loss_scaler_needs_gradients_of_all_ranks", "a_parameter_that_leaves_for_a_step"),
    "shared_steps_with_gradients_that_have_a_graph",
}


def rows_to_each_rank() -> None:
    """All-to-all with as many rows to a rank as its number and one."""
    n, r = hvd.size(), hvd.rank()
    counts = [rank + 1 for rank in range(n)]
    rows = torch.cat([torch.full((count, 2), 10.0 * r + count) for count in counts])
    received, splits = hvd.alltoall(rows, counts)
    assert splits.tolist() == [r + 1] * n
    assert received[:, 1].tolist() == [10.0 * k + r + 1 for k in range(n) for _ in range(r + 1)]


MODULES = {
    "operations": ("torch_operation_cases", "torch_async_cases"),
    "optimizers": ("torch_optimizer_gradient_cases", "torch_optimizer_use_cases"),
    "exchanges": ("torch_exchange_cases",),
    "sharded": ("torch_sharded_cases",),
}


def stage() -> None:
    """Have hvdtrain copy to the host what the engine takes as it is: the fault to be caught."""
    vars(torch_routes)["_make"] = lambda *_: torch_routes.StagingRoute(HOST, pinned=False)
    usual, on_host = vars(buckets)["bucket_memory"], {DEVICE: "cpu"}
    vars(buckets)["bucket_memory"] = lambda *given: usual(*given[:-1], on_host)


def main(names: str, fault: str) -> None:
    """Run cases; what they do themselves may look at results, and hvdtrain may not."""
    make_known()
    hvd.init()
    if fault:
        stage()
    modules = [import_module(name) for topic in names.split("+") for name in MODULES[topic]]
    found = cases_of(*modules) + [rows_to_each_rank] * ("operations" in names)
    cases = [case for case in found if case.__name__ not in LEFT_OUT]
    torch.set_default_device(DEVICE)
    for case in cases:
        print(case.__name__, file=sys.stderr, flush=True)
        with allowed():
            case()
    report(cases=len(cases), payload=refusals())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
