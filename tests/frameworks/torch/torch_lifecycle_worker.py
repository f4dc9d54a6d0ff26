"""What is left unfinished on each rank, at the end of the job, too."""

from __future__ import annotations

# Whose functions add themselves to the table.
import torch
import torch_lifecycle_cases  # noqa: F401
from ranks import report
from torch_training import CASES

import hvdtrain.torch as hvd

if __name__ == "__main__":
    hvd.init()
    for function in CASES:
        function()
    report(cases=len(CASES))
    if hvd.rank() == 0:
        hvd.allreduce_async_(torch.ones(2), name="at the end")
