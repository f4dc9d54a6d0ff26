#!/usr/bin/env bash
# PyTorch 2.13.0: both quantization hooks of DistributedDataParallel raise IndexError in the first backward pass on gloo.
#
# Seen with torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11. The hooks take the first value of the future of all_gather
# for the list of all ranks' tensors. So it is on NCCL; on gloo it is the tensor of rank 0, and the hooks index into
# its numbers. Hooks that compress to float16 or with PowerSGD work on both. The documentation of the hooks names no
# backend.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat >"$folder/hooks.py" <<'PYTHON'
import os

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, quantization_hooks
from torch.nn.parallel import DistributedDataParallel


def work(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for hook in (
        default_hooks.fp16_compress_hook,
        quantization_hooks.quantization_pertensor_hook,
        quantization_hooks.quantization_perchannel_hook,
    ):
        model = DistributedDataParallel(torch.nn.Linear(4, 2))
        model.register_comm_hook(dist.group.WORLD, hook)
        try:
            model(torch.ones(3, 4)).sum().backward()
            seen = "works"
        except RuntimeError as error:
            seen = "IndexError" if "IndexError" in str(error) else str(error)
        if rank == 0:
            print(f"{hook.__name__}: {seen}", flush=True)
        assert seen == ("works" if hook is default_hooks.fp16_compress_hook else "IndexError"), f"changed: {seen}"
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (os.path.join(os.path.dirname(__file__), "store"),), 2)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/hooks.py"
