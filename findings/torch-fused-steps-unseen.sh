#!/usr/bin/env bash
# PyTorch 2.13.0: steps of optimizers with fused=True are not seen by autograd, which then uses changed weights.
#
# Seen with torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11: a second backward pass through a graph that was kept
# over a step raises an error, because step() changed a weight that the graph needs. With fused=True the
# version of the weights stays as it was (SGD, Adam, AdamW, Adagrad), and the second pass computes gradients with
# the new weights and the old activations: of sum(w * x) with w = 1 and rate 0.1 the gradient of x is 0.9
# instead of an error. Programs with two losses on one graph and a step between them, as GANs have, lose
# the check when somebody adds fused=True to make them faster.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch

assert torch.__version__.startswith("2.13.0"), torch.__version__


def second_pass(kind, fused):
    weight, x = (torch.nn.Parameter(torch.ones(3)) for _ in "wx")
    optimizer = kind([weight], lr=0.1, fused=fused)
    loss = (weight * x).sum()
    loss.backward(retain_graph=True)
    version, x.grad = weight._version, None
    optimizer.step()
    counted = weight._version > version
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error), error
        return counted, "an error"
    return counted, [round(value, 4) for value in x.grad.tolist()]


for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
    plain, fused = (second_pass(kind, fused) for fused in (False, True))
    print(f"{kind.__name__}: second pass gives {plain[1]}, with fused=True {fused[1]}")
    assert plain == (True, "an error"), "changed: the default form"
    assert fused[0] is False and fused[1] != "an error", "changed: fused=True"
    assert fused[1][0] < 1, "changed: the gradient"
PYTHON
