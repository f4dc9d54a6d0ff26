#!/usr/bin/env bash
# PyTorch 2.13.0: AveragedModel(use_buffers=True) averages integer and boolean buffers, too.
#
# Seen with torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11: after five batches num_batches_tracked of a
# BatchNorm1d is 1 in the averaged model, because each average is cut to an integer. A table of indices
# that changes from [5, 100] to [6, 0] becomes [5, 50], which is neither; with the exponential
# average a boolean mask becomes the union of all masks so far, and with the plain average the
# second update raises RuntimeError. Without use_buffers all of them are copied. Sparse training's
# masks and indices, or a count of steps, are such buffers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

assert torch.__version__.startswith("2.13.0"), torch.__version__
EXPONENTIAL = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}


def averaged(values, **how):
    """Return the averaged model's buffer after the model has had each of the values."""
    model = torch.nn.Linear(1, 1)
    model.register_buffer("table", torch.tensor(values[0]))
    average = AveragedModel(model, **how)
    for value in values:
        model.table = torch.tensor(value)
        average.update_parameters(model)
    return average.module.table.tolist()


for name, how in (("plain", {}), ("exponential", EXPONENTIAL)):
    norm = torch.nn.BatchNorm1d(1)
    average = AveragedModel(norm, use_buffers=True, **how)
    for _ in range(5):
        norm(torch.randn(4, 1))
        average.update_parameters(norm)
    tracked = average.module.num_batches_tracked.item()
    print(f"{name} average: num_batches_tracked {norm.num_batches_tracked.item()} becomes {tracked}")
    assert tracked == 1, "changed: num_batches_tracked"

indices = [[5, 100], [6, 0]]
mixed, copied = averaged(indices, use_buffers=True), averaged(indices)
print(f"indices {indices[0]}, then {indices[1]}: {mixed}; without use_buffers {copied}")
assert mixed == [5, 50] and copied == [6, 0], "changed: indices"

masks = [[True, False], [False, True]]
union = averaged(masks, use_buffers=True, **EXPONENTIAL)
print(f"masks {masks[0]}, then {masks[1]}: exponential average {union}")
assert union == [True, True], "changed: masks"
try:
    averaged(masks, use_buffers=True)
except RuntimeError as error:
    print(f"masks, plain average: RuntimeError: {str(error).splitlines()[0]}")
else:
    raise SystemExit("changed: the plain average of masks")
PYTHON
