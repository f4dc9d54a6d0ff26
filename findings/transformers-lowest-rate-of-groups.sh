#!/usr/bin/env bash
# transformers 5.24.0: groups end at other learning rates than min_lr and lr_end.
#
# Seen with transformers 5.24.0, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11: the cosine schedule's min_lr is "the
# minimum learning rate to reach", and the polynomial one decays to the "end lr defined by lr_end". Both divide it
# by the default rate of the optimizer, and multiply each group's own rate by the result. Groups that have
# rates of their own, as for layer-wise decay or a head on a backbone, end at other rates: a backbone at
# 1e-4 ends at 1e-6 instead of 1e-5, a tenth, and a head at 1e-2 at 1e-4, ten times as much. The default that
# decides is AdamW's 1e-3 even if no group trains with it. One rate for all, given as argument, ends as asked.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy==2.4.6
cat >"$folder/script.py" <<'PYTHON'
import math

import torch
import transformers

assert transformers.__version__ == "5.24.0", transformers.__version__
STEPS, LOWEST = 100, 1e-5


def cosine(optimizer):
    return transformers.get_cosine_with_min_lr_schedule_with_warmup(optimizer, 0, STEPS, min_lr=LOWEST)


def polynomial(optimizer):
    return transformers.get_polynomial_decay_schedule_with_warmup(optimizer, 0, STEPS, lr_end=LOWEST)


def last_rates(schedule, rates, **defaults):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], **({} if rate is None else {"lr": rate})} for rate in rates]
    optimizer = torch.optim.AdamW(groups, **defaults)
    scheduler = schedule(optimizer)
    for _ in range(STEPS):
        optimizer.step()
        scheduler.step()
    return [group["lr"] for group in optimizer.param_groups]


def same(seen, expected):
    return all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(seen, expected, strict=True))


for schedule in (cosine, polynomial):
    alone = last_rates(schedule, [None], lr=1e-4)
    own = last_rates(schedule, [1e-4])
    groups = last_rates(schedule, [1e-4, 1e-3, 1e-2])
    print(f"{schedule.__name__} to {LOWEST}: the argument lr=1e-4 ends at {alone}, a group with lr=1e-4 at {own}")
    print(f"{schedule.__name__} to {LOWEST}: groups of 1e-4, 1e-3 and 1e-2 end at {groups}")
    assert same(alone, [LOWEST]), "changed: one rate"
    assert same(own, [1e-6]) and same(groups, [1e-6, 1e-5, 1e-4]), "changed: groups"
PYTHON
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W error::UserWarning "$folder/script.py"
