#!/usr/bin/env bash
# ema-pytorch 0.8.3: counts, indices, masks and flags of the averaged model stay as they were at first.
#
# Seen with ema-pytorch 0.8.3, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11: EMA averages parameters and floating-point
# buffers. Buffers of other types, which cannot be averaged, are not copied either: not by update, and not by
# copy_params_from_model_to_ema. A mask of pruned weights, a running index or a number of batches is that of the
# first copy, beside parameters that follow. A layer that initializes itself from its first batch, and notes
# that in a flag, does it again in the averaged model: the first evaluation overwrites its averages with
# statistics of that batch. PyTorch's AveragedModel copies such buffers, unless it is told to average them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ema-pytorch==0.8.3 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import torch
from ema_pytorch import EMA

assert version("ema-pytorch") == "0.8.3", version("ema-pytorch")


class Normalizes(torch.nn.Module):
    """Take scale and shift from the first batch, then train them."""

    def __init__(self):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, inputs):
        if not self.ready:
            self.shift.data.fill_(inputs.mean())
            self.ready.fill_(True)
        self.batches += self.training
        return inputs - self.shift


model = Normalizes()
copying = torch.optim.swa_utils.AveragedModel(model)
average = EMA(model, beta=0.5, update_after_step=0, update_every=1)
for step in range(20):
    model(torch.full((4,), 3.0))
    model.mean.fill_(7)
    average.update()
    copying.update_parameters(model)
average.copy_params_from_model_to_ema()
kept = average.ema_model
print(f"trained: ready {model.ready}, {model.batches} batches, mean {model.mean.item()}, shift {model.shift.item()}")
print(f"averaged: ready {kept.ready}, {kept.batches} batches, mean {kept.mean.item()}, shift {kept.shift.item()}")
assert (model.ready.item(), model.batches.item(), model.mean.item(), model.shift.item()) == (True, 20, 7, 3)
assert kept.mean.item() == 7 and kept.shift.item() == 3, "changed: floating-point numbers"
assert copying.module.ready.item() is True and copying.module.batches.item() == 20, "changed: AveragedModel"
assert kept.ready.item() is False and kept.batches.item() == 0, "changed: other buffers"

average.eval()
average(torch.full((4,), 100.0))
print(f"averaged, after an evaluation of 100: shift {kept.shift.item()}")
assert kept.shift.item() == 100, "changed: evaluation"
PYTHON
