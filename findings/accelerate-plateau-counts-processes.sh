#!/usr/bin/env bash
# Accelerate 1.15.0: with four processes, ReduceLROnPlateau lowers the rate although every epoch is better.
#
# Seen with Python 3.11, PyTorch 2.13.0, gloo, 1 and 4 CPU processes. A prepared scheduler takes one step for each process
# at every call, as its documentation says of schedules that count batches. ReduceLROnPlateau compares losses instead: the
# repeated calls see the loss that was just seen, and count it as an epoch without progress. With a patience of
# 2 and four processes every epoch has three of them, so each call halves the rate; one process keeps it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 accelerate==1.15.0
cat >"$folder/plateau.py" <<'PYTHON'
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
rates = []
for loss in (10.0, 9.0, 8.0, 7.0):
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    scheduler.step(loss)
    rates.append(optimizer.param_groups[0]["lr"])
accelerator.print(f"{accelerator.num_processes} processes, losses 10, 9, 8, 7: rates {rates}")
PYTHON
while IFS=: read -r processes expected; do
    "$folder/venv/bin/torchrun" --standalone --nproc-per-node "$processes" "$folder/plateau.py" </dev/null >"$folder/output" 2>&1
    grep -F "$processes processes, losses 10, 9, 8, 7: rates $expected" "$folder/output" || { echo "changed:"; cat "$folder/output"; exit 1; }
done <<'CASES'
1:[1.0, 1.0, 1.0, 1.0]
4:[0.5, 0.25, 0.125, 0.0625]
CASES
