#!/usr/bin/env bash
# torch_optimizer 0.3.0: RAdam moves the parameters of all groups with the learning rate of the first.
#
# Seen with torch-optimizer 0.3.0, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11: RAdam keeps the size of a step, the
# learning rate included, in a buffer that all groups share unless their betas differ. The first group fills it,
# and the others take it from there, at every step: a backbone at a rate of 0.0001 beside a head at 0.1
# trains at 0.1, and groups at a rate of 0 are not frozen. `param_groups`, and what schedulers and logs read from
# it, hold the rates that were asked for. torch.optim.RAdam keeps them, and so does a separate optimizer for each group.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch-optimizer==0.3.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import torch
import torch_optimizer

assert version("torch-optimizer") == "0.3.0", version("torch-optimizer")
HEAD, BACKBONE = 0.1, 0.0001


def moved(*optimizers_and_parameters):
    """Return how far each parameter is from 1 after 20 steps with a gradient of 1."""
    optimizers, parameters = optimizers_and_parameters
    for _ in range(20):
        for parameter in parameters:
            parameter.grad = torch.ones(1)
        for optimizer in optimizers:
            optimizer.step()
    return [round(1 - parameter.item(), 5) for parameter in parameters]


def in_groups(kind):
    head, backbone = parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    groups = [{"params": [head], "lr": HEAD}, {"params": [backbone], "lr": BACKBONE}]
    return moved([kind(groups, lr=HEAD)], parameters)


def apart(kind):
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    return moved([kind([each], lr=rate) for each, rate in zip(parameters, (HEAD, BACKBONE))], parameters)


for kind in (torch.optim.RAdam, torch_optimizer.RAdam):
    print(f"{kind.__module__}: head and backbone move by {in_groups(kind)} in groups, {apart(kind)} apart")
assert in_groups(torch.optim.RAdam) == apart(torch.optim.RAdam), "changed: PyTorch's RAdam"
head, backbone = apart(torch_optimizer.RAdam)
assert abs(head / backbone - HEAD / BACKBONE) < 50, "changed: separate optimizers"
assert in_groups(torch_optimizer.RAdam) == [head, head], "changed: groups"
PYTHON
