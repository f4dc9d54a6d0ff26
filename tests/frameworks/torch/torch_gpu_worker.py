"""Cases of torch on a device. Arguments: cpu or cuda, then topics, or names of cases."""

import sys
from types import ModuleType

import torch_async_cases
import torch_compile_cases
import torch_exchange_cases
import torch_gpu_graph_cases
import torch_gpu_operation_cases
import torch_gpu_optimizer_cases
import torch_gpu_step_cases
import torch_operation_cases
import torch_optimizer_gradient_cases
import torch_optimizer_hook_cases
import torch_optimizer_use_cases
from all_cases import Case, cases_of
from gpu_ranks import run_cases, take_device

import hvdtrain.torch as hvd

# These are about what is no tensor, or about time, or belong to another topic.
NOT_OF_A_DEVICE = {
    "a_backward_that_a_signal_ends_leaves_no_thread_and_no_wait_behind",
    "compiled_steps",
    "objects_that_pickle_refuses",
    "process_sets_that_are_lists",
    "returns_while_the_peer_is_absent",
}


def of_the_cpu(*modules: ModuleType) -> list[Case]:
    """Return the cases that are run on the CPU, too, but for those that look into its memory."""
    return [
        case
        for case in cases_of(*modules)
        if case.__name__ not in NOT_OF_A_DEVICE
        and "lie_in_engine_memory" not in case.__code__.co_names
    ]


TOPICS: dict[str, list[Case]] = {
    "operations": cases_of(torch_gpu_operation_cases),
    "operations of the cpu": of_the_cpu(torch_operation_cases, torch_async_cases),
    "optimizers": cases_of(torch_gpu_optimizer_cases),
    "optimizers of the cpu": of_the_cpu(
        *(torch_exchange_cases, torch_optimizer_gradient_cases),
        *(torch_optimizer_hook_cases, torch_optimizer_use_cases),
    ),
    "step": cases_of(torch_gpu_step_cases),
    "graphs": cases_of(torch_compile_cases, torch_gpu_graph_cases),
}


def chosen(words: list[str]) -> list[Case]:
    named = {case.__name__: case for cases in TOPICS.values() for case in cases}
    return [case for word in words for case in TOPICS.get(word) or [named[word]]]


if __name__ == "__main__":
    device = take_device(sys.argv[1])
    cases = chosen(sys.argv[2:])
    hvd.init()
    with device:  # where tensors are made
        run_cases(cases, hvd.rank(), hvd.size())
