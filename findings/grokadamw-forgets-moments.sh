#!/usr/bin/env bash
# grokadamw 0.1.2: after a restart GrokAdamW has lost its moments and its count of steps, and says nothing.
#
# Seen with grokadamw 0.1.2, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11. It keeps the state of each weight in the
# parameter group, under the weight itself, and not in the optimizer's `state`: `state_dict()["state"]` is empty, and
# the groups hold a copy of all weights as keys. load_state_dict() brings these keys back, but the new model's weights
# are others: each starts with moments of 0, and with the large first steps of a new optimizer. What copies or
# broadcasts `state` among processes finds nothing either.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet grokadamw==0.1.2 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import io

import torch
from grokadamw import GrokAdamW


def train(kind, restart):
    """Return a weight after 12 steps, with a checkpoint loaded into a new optimizer after 6 of them."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = kind([weight], lr=0.1)
    for step in range(12):
        if restart and step == 6:
            checkpoint = io.BytesIO()
            torch.save(optimizer.state_dict(), checkpoint)
            checkpoint.seek(0)
            weight = torch.nn.Parameter(weight.detach().clone())
            optimizer = kind([weight], lr=0.1)
            optimizer.load_state_dict(torch.load(checkpoint, weights_only=False))
        weight.grad = torch.full((1,), 1.0 if step < 6 else -0.1)
        optimizer.step()
    return round(weight.item(), 3), len(optimizer.state_dict()["state"])


for kind in (torch.optim.AdamW, GrokAdamW):
    whole, restarted = train(kind, False), train(kind, True)
    print(f"{kind.__name__}: {whole[0]} after 12 steps, {restarted[0]} with a restart; weights in `state`: {whole[1]}")
    if kind is GrokAdamW:
        assert abs(whole[0] - restarted[0]) > 0.1 and whole[1] == 0, "changed"
    else:
        assert whole == restarted, "changed: AdamW"
PYTHON
