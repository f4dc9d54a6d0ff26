"""`python -m hvdtrain` on a rank that may share its GPU. Arguments: those of hvdtrain.

With HVDTRAIN_TEST_APART ranks see what a scheduler shows them that leaves each one GPU, and another
one: here it is the same, under two names.
"""

import os
import runpy
import sys

import torch
from gpu_ranks import take_device

if __name__ == "__main__":
    take_device("cuda")
    if "HVDTRAIN_TEST_APART" in os.environ:
        properties = torch.cuda.get_device_properties(0)
        names = ["0", f"GPU-{properties.uuid}"]
        os.environ["CUDA_VISIBLE_DEVICES"] = names[int(os.environ["OMPI_COMM_WORLD_RANK"])]
    sys.argv[0] = "hvdtrain"
    runpy.run_module("hvdtrain", run_name="__main__")
