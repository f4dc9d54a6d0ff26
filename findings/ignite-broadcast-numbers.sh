#!/usr/bin/env bash
# pytorch-ignite 0.5.5: idist.broadcast sends Python numbers as float32; all_reduce and all_gather keep them.
#
# Seen with pytorch-ignite 0.5.5, torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11, 2 processes, gloo: broadcast of
# 16777217 returns 16777216.0 on all ranks, the sender included: another number and another type. 1/3
# becomes 0.3333333432674408. all_reduce and all_gather of the same numbers are exact, and so are tensors.
# A seed, a step or a number of samples that rank 0 decides is such a number; seeds above 2**24 collapse
# into few, and range() refuses the result.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pytorch-ignite==0.5.5 torch==2.13.0 numpy==2.3.5
cat >"$folder/script.py" <<'PYTHON'
import ignite
import ignite.distributed as idist
import torch

assert ignite.__version__ == "0.5.5", ignite.__version__
idist.initialize("gloo")
BIG, THIRD = 2**24 + 1, 1 / 3

results = {
    f"broadcast({BIG})": (idist.broadcast(BIG, src=0), 16777216.0),
    "broadcast(1/3)": (idist.broadcast(THIRD, src=0), 0.3333333432674408),
    f"all_reduce({BIG}, 'MAX')": (idist.all_reduce(BIG, "MAX"), BIG),
    f"all_gather({BIG})": (idist.all_gather(BIG), [BIG, BIG]),
    "all_gather(1/3)": (idist.all_gather(THIRD), [THIRD, THIRD]),
    f"broadcast(tensor({BIG})).item()": (idist.broadcast(torch.tensor(BIG), src=0).item(), BIG),
}
for what, (seen, expected) in results.items():
    if idist.get_rank() == 0:
        print(f"{what}: {seen!r}")
    assert seen == expected and type(seen) is type(expected), f"changed: {what}"
idist.finalize()
PYTHON
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/script.py"
