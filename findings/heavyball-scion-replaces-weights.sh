#!/usr/bin/env bash
# heavyball 3.2.1: the first step of Scion replaces all weights by random orthogonal ones, and all biases by 0.
#
# Seen with heavyball 3.2.1, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11. The paper initializes weights on the ball
# in which it searches; heavyball does it in the first step(), whatever the weights are, without a word in the class.
# A pretrained model is lost, also with a rate of 0. The seed is the weight's index in its group, so that weights of
# one shape that stand first in two groups become equal.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet heavyball==3.2.1 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - 2>"$folder/errors" <<'PYTHON' || { cat "$folder/errors"; exit 1; }
import heavyball
import heavyball.utils
import torch

heavyball.utils.compile_mode = None
torch.manual_seed(0)
start = [torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)]


def after_a_step(kind):
    weights = [torch.nn.Parameter(weight.clone()) for weight in start]
    optimizer = kind([{"params": [weights[0], weights[2]]}, {"params": [weights[1]]}], lr=0.0)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    return [weight.detach() for weight in weights]


for kind in (heavyball.AdamW, heavyball.Muon, heavyball.Scion):
    first, second, bias = after_a_step(kind)
    kept = [torch.equal(now, before) for now, before in zip((first, second, bias), start)]
    orthogonal = torch.allclose(first @ first.T, torch.eye(4), atol=1e-5)
    equal, zero = torch.equal(first, second), not bias.any()
    print(f"{kind.__name__} with lr=0: kept {kept}, orthogonal {orthogonal}, equal in both groups {equal}, bias 0 {zero}")
    if kind is heavyball.Scion:
        assert not any(kept) and orthogonal and equal and zero, "changed"
    else:
        assert all(kept), f"changed: {kind.__name__}"
PYTHON
