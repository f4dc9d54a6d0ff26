#!/usr/bin/env bash
# PyTorch 2.13.0: loading an optimizer's state makes bfloat16 of its counters, masks, and float32 sums.
#
# Seen with torch 2.13.0 (CPU), Python 3.11: Optimizer.load_state_dict converts all tensors of a parameter's state, but
# the one that is named "step", to the type of the parameter if that is a floating one. With weights in bfloat16, a
# counter of 1001 in int64 becomes 1000, and adding 1 changes it no more, so that a correction or schedule that counts
# stands still from there; a mask of bool, that ~ turned, holds numbers; indices are other indices; sums that an
# optimizer keeps in float32 on purpose lose 16 bits. torch's NAdam continues with its mu_product in bfloat16. With
# float32 weights a counter above 16,777,216 is rounded. torch.save and torch.load keep the types. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W error - "$folder/state.pt" <<'PYTHON'
import sys

import torch

assert torch.__version__.startswith("2.13.0"), torch.__version__


class Counting(torch.optim.Optimizer):
    """Plain steps, and a state of several types."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(updates=torch.tensor(0), frozen=torch.tensor(False), total=torch.tensor(1.0))
                    state.update(index=torch.tensor(100_003))
                state["updates"] += 1
                state["total"] *= 0.9999
                parameter.sub_(parameter.grad, alpha=group["lr"])


def run(steps, optimizer):
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.zeros_like(parameter)
    for _ in range(steps):
        optimizer.step()


def resumed(kind, dtype, steps):
    """Return the states at the end without and with saving and loading in between."""
    weight = torch.nn.Parameter(torch.ones(1, dtype=dtype))
    optimizer, other = kind([weight]), kind([weight])
    run(steps, optimizer)
    torch.save(optimizer.state_dict(), sys.argv[1])
    other.load_state_dict(torch.load(sys.argv[1]))
    states = []
    for each in (optimizer, other):
        run(500, each)
        states.append({name: (value.item(), value.dtype) for name, value in each.state[weight].items()})
    return states


whole, again = resumed(Counting, torch.bfloat16, 1001)
for name in whole:
    print(f"bfloat16 weights, {name}: {whole[name]} in one run, {again[name]} after loading")
    assert again[name][1] == torch.bfloat16 != whole[name][1], f"changed: type of {name}"
assert (whole["updates"][0], again["updates"][0]) == (1501, 1000), "changed: counter"
assert (whole["index"][0], again["index"][0]) == (100_003, 99_840), "changed: index"
assert whole["total"][0] < 0.87 and again["total"][0] > 0.9, "changed: sum"
whole, again = resumed(torch.optim.NAdam, torch.bfloat16, 5)
print(f"NAdam, mu_product: {whole['mu_product'][1]} in one run, {again['mu_product'][1]} after loading")
assert again["step"] == whole["step"] and again["mu_product"][1] == torch.bfloat16, "changed: NAdam"
whole, again = resumed(Counting, torch.float32, 1001)
assert again["updates"] == (1501.0, torch.float32), "changed: float32"
PYTHON
