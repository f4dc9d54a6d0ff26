#!/usr/bin/env bash
# Optuna 5.0.0: TorchDistributedTrial hands all processes, rank 0 too, other numbers than the study has stored.
#
# Seen with optuna 5.0.0, optuna-integration 5.0.0, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11, two processes
# with gloo: suggest_float() sends the suggestion as a 32-bit number. So a value may leave the range that was
# asked for: from 0.1 to 0.1 it is 0.10000000149, a beta below 1 becomes 1.0 (which Adam refuses), and 0.3 of
# a step of 0.1 is unequal to 0.3. `trial.params` and the study have the number that no process trained with, so
# that training again with the best parameters is not the trial that was best.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 optuna==5.0.0 optuna-integration==5.0.0
cat > "$folder/sweep.py" <<'PYTHON'
import os
import sys

import optuna
import torch
from optuna_integration import TorchDistributedTrial

assert (optuna.__version__, torch.__version__[:6]) == ("5.0.0", "2.13.0")


def suggest(rank, folder):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1)) if rank == 0 else None
    trial = TorchDistributedTrial(study.ask() if rank == 0 else None)
    rate = trial.suggest_float("rate", 0.1, 0.1)
    dropout = trial.suggest_float("dropout", 0.3, 0.3, step=0.1)
    beta = trial.suggest_float("beta", 0.999999999, 0.9999999999)
    stored = trial.params
    print(f"rank {rank}: trains with {rate}, {dropout}, {beta}; stored: {list(stored.values())}", flush=True)
    assert rate > 0.1 and dropout != 0.3 and beta == 1.0, "changed: suggestions"
    assert stored["rate"] == 0.1 and stored["dropout"] == 0.3 and stored["beta"] < 1, "changed: stored"
    torch.distributed.barrier()
    os._exit(0)  # the library keeps its group, whose threads may not end before the process


if __name__ == "__main__":
    torch.multiprocessing.spawn(suggest, (sys.argv[1],), 2)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/sweep.py" "$folder"
