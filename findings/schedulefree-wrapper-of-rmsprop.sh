#!/usr/bin/env bash
# schedulefree 1.4.1: the example of its README for ScheduleFreeWrapper, around RMSprop, raises KeyError in the first step.
#
# Seen with schedulefree 1.4.1, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11. The wrapper puts its own tensor into the
# state of each weight before the wrapped optimizer's first step. RMSprop, Adam and AdamW of PyTorch initialize a
# weight only while its state is empty, and then miss their moments. SGD, and Adagrad, which initializes earlier,
# work.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet schedulefree==1.4.1 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from schedulefree import ScheduleFreeWrapper

for name, expected in (("SGD", "works"), ("Adagrad", "works"), ("RMSprop", "KeyError: 'square_avg'"), ("AdamW", "KeyError: 'exp_avg'")):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = ScheduleFreeWrapper(getattr(torch.optim, name)([weight], lr=0.0025), momentum=0.9, weight_decay_at_y=0.1)
    optimizer.train()
    weight.grad = torch.ones(2)
    try:
        optimizer.step()
        seen = "works"
    except KeyError as error:
        seen = f"KeyError: {error}"
    print(f"{name}: {seen}")
    assert seen == expected, "changed"
PYTHON
