#!/usr/bin/env bash
# torch_optimizer 0.3.0: Apollo with weight decay keeps the graph of every step that it made, and cannot go on from a checkpoint.
#
# Seen with torch_optimizer 0.3.0, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11. step() adds the weight itself to the
# gradient without no_grad(): moments, Hessian and update then belong to a graph, which grows by 19 nodes, and the
# tensors that they hold, with each step and weight until memory ends. The state that is saved requires gradients,
# too; the first step after loading it raises RuntimeError. Without weight decay neither happens.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch_optimizer==0.3.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import io

import torch
from torch_optimizer import Apollo


def nodes(tensor):
    """Return the size of the graph that leads to a tensor."""
    seen, ahead = set(), [tensor.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [before for before, _ in node.next_functions]
    return len(seen)


for decay in (0.0, 0.1):
    weight, sizes = torch.nn.Parameter(torch.ones(3)), []
    optimizer = Apollo([weight], lr=0.01, weight_decay=decay)
    for step in range(1, 301):
        weight.grad = torch.ones(3)
        optimizer.step()
        if step in (100, 300):
            sizes.append(nodes(optimizer.state[weight]["update"]))
    checkpoint = io.BytesIO()
    torch.save(optimizer.state_dict(), checkpoint)
    checkpoint.seek(0)
    optimizer = Apollo([weight], lr=0.01, weight_decay=decay)
    optimizer.load_state_dict(torch.load(checkpoint))
    try:
        optimizer.step()
        after = "goes on"
    except RuntimeError as error:
        after = f"RuntimeError: {error}"
    print(f"weight_decay={decay}: {sizes} nodes after 100 and 300 steps; from a checkpoint: {after}")
    assert sizes == ([1895, 5695] if decay else [0, 0]), "changed: the graph"
    assert ("leaf Variable" in after) == bool(decay), "changed: the checkpoint"
PYTHON
