#!/usr/bin/env bash
# PyTorch 2.13.0: the same batch has other numbers if a worker of the DataLoader makes it.
#
# Seen with torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11: with num_workers=0, default_collate stacks samples of several
# types in the type that holds them all: 7 as uint8 and 300 as int16 become int16. In a worker it stacks them
# into shared memory of the first sample's type, in silence: 300 becomes 44, a float16 before 100000 makes
# it infinite, and float64 after float32 is rounded. Which numbers are lost depends on the order of the
# samples, so with shuffling on the epoch. Who stores each label, count or mask in the smallest type that
# holds it trains on others than the run without workers has shown.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat >"$folder/script.py" <<'PYTHON'
import torch
from torch.utils.data import DataLoader

assert torch.__version__.startswith("2.13.0"), torch.__version__


def check(samples, workers, expected, dtype):
    (batch,) = DataLoader(samples, batch_size=2, num_workers=workers)
    print(f"{[str(each.dtype)[6:] for each in samples]}, {workers} workers: {batch.tolist()}, {batch.dtype}")
    assert batch.dtype == dtype and batch.tolist() == expected, "changed"


if __name__ == "__main__":
    labels = [torch.tensor(7, dtype=torch.uint8), torch.tensor(300, dtype=torch.int16)]
    check(labels, 0, [7, 300], torch.int16)
    check(labels, 1, [7, 300 % 256], torch.uint8)
    check(labels[::-1], 0, [300, 7], torch.int16)
    check(labels[::-1], 1, [300, 7], torch.int16)
    halves = [torch.tensor(1.0, dtype=torch.float16), torch.tensor(100000.0)]
    check(halves, 0, [1.0, 100000.0], torch.float32)
    check(halves, 1, [1.0, float("inf")], torch.float16)
    times = [torch.tensor(0.0), torch.tensor(2.0**24 + 1, dtype=torch.float64)]
    check(times, 0, [0.0, 16777217.0], torch.float64)
    check(times, 1, [0.0, 16777216.0], torch.float32)
PYTHON
"$folder/venv/bin/python" -W error "$folder/script.py"
