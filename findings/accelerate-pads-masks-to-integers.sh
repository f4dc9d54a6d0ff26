#!/usr/bin/env bash
# Accelerate 1.15.0: pad_across_processes turns a boolean tensor into int64, but only where it pads.
#
# Seen with accelerate 1.15.0, torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11, 2 processes: masks of length 1 and 2 come
# back with length 2 on both processes, as int64 on the first and as bool on the second. All other types
# are kept, and so is bool where no process pads. The padded tensors are meant for gather(), which
# needs one type on all processes; and where the mask indexes a tensor, [1, 0] selects rows 1 and 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet accelerate==1.15.0 torch==2.13.0 numpy==2.3.5
cat >"$folder/script.py" <<'PYTHON'
import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator

assert accelerate.__version__ == "1.15.0", accelerate.__version__
accelerator = Accelerator(cpu=True)
rank = accelerator.process_index

padded = accelerator.pad_across_processes(torch.ones(1 + rank, dtype=torch.bool))
print(f"process {rank}, mask of length {1 + rank}: {padded.tolist()}, {padded.dtype}", flush=True)
assert padded.dtype == [torch.int64, torch.bool][rank], "changed: the type of a padded mask"
rows = torch.tensor([10, 20])[padded].tolist()
print(f"process {rank}, the rows [10, 20] under this mask: {rows}", flush=True)
assert rows == [[20, 10], [10, 20]][rank], "changed: rows"

assert accelerator.pad_across_processes(torch.ones(2, dtype=torch.bool)).dtype == torch.bool, "changed: equal lengths"
for dtype in (torch.uint8, torch.int8, torch.int32, torch.float16, torch.bfloat16, torch.complex64):
    assert accelerator.pad_across_processes(torch.ones(1 + rank, dtype=dtype)).dtype == dtype, f"changed: {dtype}"
dist.barrier()
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/script.py"
