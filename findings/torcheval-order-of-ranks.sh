#!/usr/bin/env bash
# torcheval 0.0.7: each rank gets the values of all ranks in another order, its own first.
#
# Seen with Python 3.11, PyTorch 2.13.0, gloo, 3 CPU processes. `sync_and_compute` returns the result "on all ranks";
# of Cat, HitRate and ReciprocalRank that is one value for each sample. Rank r has its own samples first, then
# those of the others: what belongs to a sample lies at another place on every rank.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 torcheval==0.0.7
cat >"$folder/order.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torcheval.metrics import Cat
from torcheval.metrics.toolkit import sync_and_compute

dist.init_process_group("gloo")
rank = dist.get_rank()
metric = Cat()
metric.update(torch.tensor([float(rank)]))
orders = [None] * 3
dist.all_gather_object(orders, sync_and_compute(metric).tolist())
if rank == 0:
    print(f"orders: {orders}", flush=True)
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node 3 "$folder/order.py" </dev/null >"$folder/output" 2>&1
grep -F "orders: [[0.0, 1.0, 2.0], [1.0, 0.0, 2.0], [2.0, 0.0, 1.0]]" "$folder/output" || { echo "changed:"; cat "$folder/output"; exit 1; }
