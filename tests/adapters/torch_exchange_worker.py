"""Optimizers that exchange otherwise than by the plain average, on each rank."""

from __future__ import annotations

# Whose functions add themselves to the table.
import torch_exchange_cases  # noqa: F401
from ranks import report
from torch_training import CASES

import hvdtrain.torch as hvd
from hvdtrain.core import context

if __name__ == "__main__":
    hvd.init()
    for function in CASES:
        function()
    report(cases=len(CASES), payload=context.current().topology.node)
