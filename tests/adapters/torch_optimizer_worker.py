"""DistributedOptimizer on each rank, against one process with the whole batch."""

from __future__ import annotations

import threading

# Whose functions add themselves to the table.
import torch_compile_cases  # noqa: F401
import torch_exchange_cases  # noqa: F401
import torch_optimizer_gradient_cases  # noqa: F401
import torch_optimizer_hook_cases  # noqa: F401
import torch_optimizer_mode_cases  # noqa: F401
import torch_optimizer_use_cases  # noqa: F401
import torch_unwrapped_cases  # noqa: F401
import torch_update_cases  # noqa: F401
from ranks import report
from torch_training import CASES

import hvdtrain.torch as hvd

if __name__ == "__main__":
    hvd.init()
    for function in CASES:
        function()
    has_thread = any(thread.name == "hvdtrain-channel" for thread in threading.enumerate())
    report(cases=len(CASES), payload={"reduces in a thread": has_thread})
