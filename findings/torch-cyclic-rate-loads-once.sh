#!/usr/bin/env bash
# PyTorch 2.13.0: CyclicLR.load_state_dict takes an entry out of the dictionary that it is given.
#
# Seen with torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11: loading removes "_scale_fn_custom" from the caller's
# state, so that the same state cannot be loaded a second time (KeyError), nor by a second scheduler, and
# a checkpoint that is written from it afterwards lacks the entry. OneCycleLR, LambdaLR, MultiplicativeLR,
# SequentialLR and ReduceLROnPlateau leave the dictionary as it was. It hits programs that keep the last
# good state in memory and go back to it more than once.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torch.optim import lr_scheduler

assert torch.__version__.startswith("2.13.0"), torch.__version__
schedulers = {
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 1.0),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=8),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.9),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
    ),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer),
}
for name, make in schedulers.items():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    scheduler = make(optimizer)
    state = scheduler.state_dict()
    entries = set(state)
    scheduler.load_state_dict(state)
    lost = entries - set(state)
    try:
        scheduler.load_state_dict(state)
        second = "works"
    except KeyError as error:
        second = f"raises KeyError({error})"
    print(f"{name}: loading removes {sorted(lost) or 'nothing'}; loading again {second}")
    removes = name == "CyclicLR"
    assert lost == ({"_scale_fn_custom"} if removes else set()), f"changed: {name}"
    assert (second == "works") != removes, f"changed: {name}, the second time"
PYTHON
