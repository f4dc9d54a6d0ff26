"""What is left unfinished on each rank, at the end of the job, too."""

from __future__ import annotations

import torch
import torch_lifecycle_cases
from all_cases import cases_of
from ranks import report

import hvdtrain.torch as hvd

if __name__ == "__main__":
    hvd.init()
    cases = cases_of(torch_lifecycle_cases)
    for function in cases:
        function()
    report(cases=len(cases))
    if hvd.rank() == 0:
        hvd.allreduce_async_(torch.ones(2), name="at the end")
