#!/usr/bin/env bash
# PyTorch 2.13.0: torch.distributed.checkpoint does not load numbers that stand under integer keys.
#
# Seen with torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11, one process: of {"state": {0: {"step": 5, "m": tensor}}}, the
# form of an optimizer's state_dict(), load() restores the tensor, leaves "step" as it was, and adds the 5 under
# the key "0", a string. So a state that holds numbers, strings or None begins anew, without a message, next
# to tensors that continue. Lists are fine. MultiStepLR's state, whose milestones are integer
# keys, comes back with each of them twice, once as a string.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore - "$folder/checkpoint" <<'PYTHON'
import shutil
import sys

import torch
import torch.distributed.checkpoint as dcp

assert torch.__version__.startswith("2.13.0"), torch.__version__


def loaded(saved, into):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    dcp.save(saved, checkpoint_id=sys.argv[1])
    dcp.load(into, checkpoint_id=sys.argv[1])
    return into


saved = {"state": {0: {"step": 5, "m": torch.ones(1)}}, "groups": [{"lr": 0.5}]}
state = loaded(saved, {"state": {0: {"step": 0, "m": torch.zeros(1)}}, "groups": [{"lr": 0.1}]})
print(f"saved {saved}")
print(f"loaded {state}")
assert state["state"][0]["m"].item() == 1 and state["groups"] == [{"lr": 0.5}], "changed: tensors and lists"
assert state["state"][0]["step"] == 0 and state["state"]["0"] == {"step": 5}, "changed: numbers"


def scheduler():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])


milestones = loaded({"schedule": scheduler().state_dict()}, {"schedule": scheduler().state_dict()})
milestones = dict(milestones["schedule"]["milestones"])
print(f"milestones of MultiStepLR, loaded: {milestones}")
assert milestones == {2: 1, 4: 1, "2": 1, "4": 1}, "changed: milestones"
PYTHON
