"""hvdtrain.torch on each rank, in one job after the other: torch_worker.py JOBS.

A job is a table of cases, with settings: "optimizers", or "operations ENGINE=gloo". In a table "in
place" gradients of all sizes are reduced where autograd makes them, where that can be done.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import torch_async_cases
import torch_batch_norm_cases

# Whose functions add themselves to the table of torch_training.
import torch_compile_cases  # noqa: F401
import torch_exchange_cases
import torch_local_cases
import torch_operation_cases
import torch_optimizer_gradient_cases  # noqa: F401
import torch_optimizer_hook_cases  # noqa: F401
import torch_optimizer_use_cases  # noqa: F401
import torch_post_local_cases
import torch_repeated_cases
import torch_sharded_bits_cases
import torch_sharded_cases
import torch_sharded_use_cases
import torch_state_cases
import torch_table_cases
import torch_table_member_cases
import torch_training
import torch_unwrapped_cases  # noqa: F401
import torch_update_cases  # noqa: F401
from shared_launch import run_each
from torch_table_cases import FOUND, run_features

import hvdtrain.torch as hvd
from hvdtrain.core import allocators, context
from hvdtrain.torch.gradients import views

_OF_EXCHANGES = (
    torch_exchange_cases.__name__,
    torch_local_cases.__name__,
    torch_post_local_cases.__name__,
)
LEAST_BYTES = allocators.LEAST_BYTES
OF_EXCHANGES = [c for c in torch_training.CASES if c.__module__ in _OF_EXCHANGES]
_SHARDED = (
    torch_sharded_cases.__name__,
    torch_sharded_bits_cases.__name__,
    torch_sharded_use_cases.__name__,
)
SHARDED = [c for c in torch_training.CASES if c.__module__ in _SHARDED]
TABLES = {
    "sharded": SHARDED,
    "operations": [
        *(case for case in torch_operation_cases.CASES for _ in range(2)),
        *torch_repeated_cases.CASES,
        *torch_state_cases.CASES,
    ],
    "asynchronous": torch_async_cases.CASES,
    "batch norm": torch_batch_norm_cases.CASES,
    "optimizers": torch_training.CASES,
    "exchanges": OF_EXCHANGES,
    "table of two": [lambda: run_features(torch_table_cases.FEATURES)],
    "table of three": [lambda: run_features(torch_table_member_cases.member_features())],
}


def run(job: str) -> dict[str, object]:
    """Run a table in a job of its own, and return what the tests look at."""
    table, *settings = job.split(", ")
    in_place = table.endswith(" in place")
    table = table.removesuffix(" in place")
    for module in (allocators, views):
        vars(module)["LEAST_BYTES"] = 1 if in_place else LEAST_BYTES
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
    """All that can be asked for."""

    def __missing__(self, job: str) -> Callable[[], object]:
        return lambda: run(job)


if __name__ == "__main__":
    run_each(Jobs(), sys.argv[1:])
