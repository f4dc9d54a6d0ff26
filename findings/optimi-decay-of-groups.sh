#!/usr/bin/env bash
# torch-optimi 0.3.3: with decouple_lr, the weight decay of a group that has its own rate is too strong or too weak by that ratio.
#
# Seen with torch-optimi 0.3.3, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11. decouple_lr=True shall make weight decay
# independent of the rate: it is multiplied by lr / max_lr, so that it follows a schedule. But max_lr is the
# optimizer's own lr for all groups that do not set it: a group with a rate ten times as large decays by 10 % a step
# instead of 1 %, and one with a tenth of it (the usual lower rate of a pretrained body) by 0.1 %.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch-optimi==0.3.3 packaging==25.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import optimi
import torch

for kind in (optimi.AdamW, optimi.Adan, optimi.StableAdamW):
    lost = []
    for rate in (0.001, 0.01, 0.1):
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = kind([{"params": [weight], "lr": rate}], lr=0.01, weight_decay=0.01, decouple_lr=True)
        weight.grad = torch.zeros(1)
        optimizer.step()
        lost.append(round(1 - weight.item(), 4))
    print(f"{kind.__name__}(lr=0.01, weight_decay=0.01): groups with rates of 0.001, 0.01 and 0.1 lose {lost} in a step")
    assert [round(each, 3) for each in lost] == [0.001, 0.01, 0.1 if kind is not optimi.Adan else round(1 - 1 / 1.1, 3)], "changed"
PYTHON
