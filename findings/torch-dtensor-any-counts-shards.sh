#!/usr/bin/env bash
# PyTorch 2.13.0: any() of a sharded DTensor counts the shards once it is made a number.
#
# Seen with torch 2.13.0 (CPU), gloo, Python 3.11, 3 processes: `tensor.isnan().any(0)` of a DTensor that is sharded by
# rows is True for columns with NaN, and so is its full_tensor(). float(), int(), long(), `* 1`, and sum() add up what
# each process has: a column with NaN in the rows of 3 processes is 3, two columns with NaN sum to 4, and the share of
# columns with NaN of 4 columns is 1.0 instead of 0.5. On one process, and with count_nonzero(), all is right, and all()
# has no such fault. Counts of broken columns, of experts or tokens in use, and masks made of any() by float() are
# wrong, and differ with the number of processes. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat >"$folder/script.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

assert torch.__version__.startswith("2.13.0"), torch.__version__
USES = {
    "itself": lambda found: found,
    "~": lambda found: ~found,
    "count_nonzero()": lambda found: found.count_nonzero(),
    "where()": lambda found: torch.where(found, 1.0, 0.0),
    "float()": lambda found: found.float(),
    "long()": lambda found: found.long(),
    "* 1": lambda found: found * 1,
    "sum()": lambda found: found.sum(),
    "float().mean()": lambda found: found.float().mean(),
}
WRONG = {
    "float()": [3.0, 0.0, 1.0, 0.0],
    "long()": [3, 0, 1, 0],
    "* 1": [3, 0, 1, 0],
    "sum()": 4,
    "float().mean()": 1.0,
}
dist.init_process_group("gloo")
values = torch.zeros(6, 4)
values[:, 0] = values[1, 2] = float("nan")
sharded = distribute_tensor(values, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
for what, use in USES.items():
    right, seen = use(values.isnan().any(0)).tolist(), use(sharded.isnan().any(0))
    seen = (seen.full_tensor() if isinstance(seen, DTensor) else seen).tolist()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes, any(0), {what}: {seen} of {right}", flush=True)
    assert seen == (right if dist.get_world_size() == 1 else WRONG.get(what, right)), f"changed: {what}"
everywhere = sharded.isfinite().all(0).sum().full_tensor().item()
assert everywhere == 2, "changed: all"
dist.barrier()
dist.destroy_process_group()
PYTHON
for processes in 1 3; do
    OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node "$processes" "$folder/script.py"
done
