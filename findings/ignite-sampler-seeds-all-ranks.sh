#!/usr/bin/env bash
# pytorch-ignite 0.5.5: the sampler that `auto_dataloader` makes seeds the program: equal dropout masks, in every epoch.
#
# Seen with Python 3.11, PyTorch 2.13.0, gloo, 2 processes seeded differently: a DataLoader with a sampler of the
# program's own. `idist.auto_dataloader` wraps it in DistributedProxySampler, whose iteration calls
# `torch.manual_seed` with its seed plus the epoch on every rank, and leaves it so: whatever the program
# seeded is lost, and the dropout masks of both ranks are equal. The epoch is 0 unless the program calls
# `set_epoch`, so the second epoch has the masks of the first. Without a sampler ignite takes PyTorch's
# DistributedSampler, which has a generator of its own, and nothing of this happens.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 pytorch-ignite==0.5.5
cat >"$folder/masks.py" <<'PYTHON'
import sys

import ignite.distributed as idist
import torch
from torch.utils.data import WeightedRandomSampler


def masks(loader):
    return torch.cat([torch.nn.functional.dropout(torch.ones(64)) for _ in loader])


with idist.Parallel(backend="gloo"):
    torch.manual_seed(1000 + idist.get_rank())
    own = {"sampler": WeightedRandomSampler([1.0] * 16, 16)} if sys.argv[1] == "own" else {}
    loader = idist.auto_dataloader(range(16), batch_size=4, **own)
    first, second = masks(loader), masks(loader)
    both = idist.all_gather(first).view(2, -1)
    if idist.get_rank() == 0:
        equal = [torch.equal(*both), torch.equal(first, second)]
        print(f"{sys.argv[1]} sampler: equal masks on both ranks, in both epochs: {equal}", flush=True)
PYTHON
while read -r sampler expected; do
    "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/masks.py" "$sampler" </dev/null >"$folder/output" 2>&1
    grep -F "$sampler sampler: equal masks on both ranks, in both epochs: $expected" "$folder/output" || { echo "changed:"; cat "$folder/output"; exit 1; }
done <<'CASES'
own [True, True]
no [False, False]
CASES
