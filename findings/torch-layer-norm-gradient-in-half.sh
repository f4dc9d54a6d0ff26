#!/usr/bin/env bash
# PyTorch 2.13.0: in bfloat16, gradients of LayerNorm's weight and bias end at 256 for each thread, on CPUs.
#
# Seen with torch 2.13.0 (CPU), Python 3.11: the gradient of the bias is the sum over all rows of the batch. With 5000
# rows (10 sequences of 500 tokens) and gradients of 1 it is 256 with one thread and 512 with two, instead of 4992: each
# thread keeps its sum in bfloat16, where 256 and 1 are 256. float16 ends at 2048 for each. The weight's gradient is as
# small. So both depend on OMP_NUM_THREADS, which torchrun sets to 1, and a larger batch does not add to them.
# BatchNorm, GroupNorm, and the bias of Linear are right, and so is LayerNorm with its weights in float32, as autocast
# has it. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W error - <<'PYTHON'
import torch

assert torch.__version__.startswith("2.13.0"), torch.__version__
ROWS = 5000
LAYERS = {
    "LayerNorm": torch.nn.LayerNorm(2),
    "BatchNorm": torch.nn.BatchNorm1d(2),
    "GroupNorm": torch.nn.GroupNorm(1, 2),
    "Linear": torch.nn.Linear(2, 2),
}


def gradients(layer, dtype, threads):
    """Return the gradient of the bias, and of the weight, whose input is 1 or -1 with the sign that adds up."""
    torch.set_num_threads(threads)
    layer = layer.to(dtype)
    layer.zero_grad()
    output = layer(torch.tensor([1.0, -1.0], dtype=dtype).expand(ROWS, 2).contiguous())
    bias, weight = (
        torch.autograd.grad(output, parameter, torch.tensor(signs, dtype=dtype).expand(ROWS, 2), retain_graph=True)[0]
        for parameter, signs in ((layer.bias, [1.0, 1.0]), (layer.weight, [1.0, -1.0]))
    )
    return bias[0].item(), abs(weight.flatten()[0].item())


for dtype, end, nearest in ((torch.bfloat16, 256, 4992), (torch.float16, 2048, 5000), (torch.float32, 5000, 5000)):
    for threads in (1, 2):
        seen = {name: gradients(layer, dtype, threads) for name, layer in LAYERS.items()}
        print(f"{dtype}, {threads} threads, sums of {ROWS} rows of 1: {seen}")
        bias, weight = seen["LayerNorm"]
        sums = min(end * threads, nearest)
        assert bias == sums and abs(weight / sums - 1) < 0.01, "changed: LayerNorm"
        assert all(seen[name][0] == nearest for name in ("BatchNorm", "GroupNorm", "Linear")), "changed: other layers"
PYTHON
