"""hvdtrain.torch on each rank, in one job after the other: torch_worker.py JOBS.

A job is a table of cases, with settings: "optimizers", or "operations ENGINE=gloo". In a table "in
place" gradients of all sizes are reduced where autograd makes them, where that can be done.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence

import torch_async_cases
import torch_batch_norm_cases
import torch_compile_cases
import torch_derivative_cases
import torch_exchange_cases
import torch_local_cases
import torch_operation_cases
import torch_optimizer_gradient_cases
import torch_optimizer_hook_cases
import torch_optimizer_use_cases
import torch_repeated_cases
import torch_sharded_bits_cases
import torch_sharded_cases
import torch_state_cases
import torch_table_cases
import torch_unwrapped_cases
import torch_update_cases
from all_cases import cases_of
from shared_launch import run_each
from torch_table_cases import FOUND, run_features

import hvdtrain.torch as hvd
from hvdtrain.core import allocators, context

LEAST_BYTES = allocators.LEAST_BYTES
SHARDED = cases_of(torch_sharded_cases, torch_sharded_bits_cases)
OF_EXCHANGES = cases_of(torch_exchange_cases, torch_local_cases)
OPTIMIZERS = cases_of(
    *(torch_compile_cases, torch_optimizer_gradient_cases, torch_optimizer_hook_cases),
    *(torch_optimizer_use_cases, torch_unwrapped_cases, torch_update_cases),
)
TABLES: dict[str, Sequence[Callable[[], object]]] = {
    "sharded": SHARDED,
    "operations": [
        *(case for case in cases_of(torch_operation_cases) for _ in range(2)),
        *cases_of(torch_repeated_cases, torch_state_cases, torch_derivative_cases),
    ],
    "asynchronous": cases_of(torch_async_cases),
    "batch norm": cases_of(torch_batch_norm_cases),
    "optimizers": [*OPTIMIZERS, *OF_EXCHANGES, *SHARDED],
    "exchanges": OF_EXCHANGES,
    "table of two": [lambda: run_features(torch_table_cases.FEATURES)],
    "table of three": [lambda: run_features(torch_table_cases.member_features())],
}


def run(job: str) -> dict[str, object]:
    table, *settings = job.split(", ")
    in_place = table.endswith(" in place")
    table = table.removesuffix(" in place")
    allocators.LEAST_BYTES = 1 if in_place else LEAST_BYTES
    os.environ |= dict(f"HVDTRAIN_{setting}".split("=") for setting in settings)
    hvd.init()
    for case in TABLES[table]:
        case()
    has_thread = any(thread.name == "hvdtrain-channel" for thread in threading.enumerate())
    here = context.current().topology
    found = dict(FOUND)
    FOUND.clear()
    hvd.shutdown()
    for setting in settings:
        del os.environ[f"HVDTRAIN_{setting.partition('=')[0]}"]
    place = [here.rank, here.size, here.node]
    return {"place": place, "reduces in a thread": has_thread, "found": found}


class Jobs(dict[str, Callable[[], object]]):
    def __missing__(self, job: str) -> Callable[[], object]:
        return lambda: run(job)


if __name__ == "__main__":
    run_each(Jobs(), sys.argv[1:])
