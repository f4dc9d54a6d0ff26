#!/usr/bin/env bash
# PyTorch 2.13.0: loading a checkpoint leaves the optimizer empty if a gradient is there already.
#
# Seen with torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11, one process: the documented way to load is get_state_dict(),
# which makes an optimizer's state, torch.distributed.checkpoint.load() into it, and set_state_dict(). If any parameter
# has a gradient, because the program has run a batch to warm up or to compile, get_state_dict() makes no state.
# load() then has nothing to fill, and set_state_dict() leaves Adam without its moments and its count. The
# weights are loaded, no call says anything, and training goes on with a fresh optimizer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore - "$folder/checkpoint" <<'PYTHON'
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

assert torch.__version__.startswith("2.13.0"), torch.__version__
batch = torch.ones(1, 2)


def model_and_optimizer():
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


trained, optimizer = model_and_optimizer()
for _ in range(3):
    optimizer.zero_grad()
    trained(batch).sum().backward()
    optimizer.step()
of_model, of_optimizer = get_state_dict(trained, optimizer)
dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=sys.argv[1])

for warm in (False, True):
    model, optimizer = model_and_optimizer()
    if warm:
        model(batch).sum().backward()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=sys.argv[1])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    loaded = optimizer.state.get(model.weight, {})
    equal = torch.equal(model.weight, trained.weight)
    print(f"with a gradient: {warm}; weights loaded: {equal}; Adam's state of a weight: {dict(loaded)}")
    assert equal, "changed: weights"
    assert (loaded.get("step") == 3) if not warm else (not loaded), "changed: the optimizer's state"
PYTHON
