#!/usr/bin/env bash
# PyTorch 2.13.0: moving averages of weights in bfloat16 or float16 do not move.
#
# Seen with torch 2.13.0 (CPU), Python 3.11: AveragedModel copies the model in its own type. With the decay 0.999, the
# default of get_ema_multi_avg_fn and get_ema_avg_fn, a step adds a thousandth of the difference, which bfloat16 rounds
# away: a weight that goes from 1 to 1.5 at once, and stays there, is still averaged as 1 after 10,000 updates, instead
# of 1.49998. In float16 it ends at 1.01 or 1.46. The plain mean of AveragedModel ends at 1.46 in bfloat16. What is
# evaluated and saved is a model of the first steps. In float32 all are right. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W error - <<'PYTHON'
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

assert torch.__version__.startswith("2.13.0"), torch.__version__
UPDATES = 10_000


def averaged(dtype, **options):
    model = torch.nn.Linear(1, 1, bias=False, dtype=dtype)
    torch.nn.init.ones_(model.weight)
    average = AveragedModel(model, **options)
    average.update_parameters(model)
    torch.nn.init.constant_(model.weight, 1.5)
    for _ in range(UPDATES):
        average.update_parameters(model)
    return average.module.weight.item()


KINDS = (("get_ema_multi_avg_fn", get_ema_multi_avg_fn, True), ("get_ema_avg_fn", get_ema_avg_fn, False), ("mean", None, None))
for what, moving, multi in KINDS:
    options = {} if moving is None else {"multi_avg_fn" if multi else "avg_fn": moving()}
    seen = {dtype: averaged(dtype, **options) for dtype in (torch.bfloat16, torch.float16, torch.float32)}
    print(f"{what}, of 1 once and of 1.5 {UPDATES} times: {seen}")
    right = 1.5 - (0.5 * 0.999**UPDATES if moving else 0.5 / (UPDATES + 1))
    assert abs(seen[torch.float32] - right) < 1e-3, "changed: float32"
    if moving:
        assert seen[torch.bfloat16] == 1 and seen[torch.float16] < 1.47, "changed"
    else:
        assert seen[torch.bfloat16] < 1.47, "changed: mean"
PYTHON
