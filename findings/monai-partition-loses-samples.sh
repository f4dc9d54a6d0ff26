#!/usr/bin/env bash
# MONAI 1.6.1: a data set that is divided by ratios loses samples, or leaves parts empty.
#
# Seen with monai 1.6.1, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11: partition_dataset "can split the dataset based on
# specified ratios". It rounds the size of each part on its own, and the last one does not get what is left. Thirds of
# 1000 samples are 333 each, and the last sample is in none; of 1049 in 100 parts 49 are in none. Rounding up has the
# first parts take all: 12 samples in 8 equal parts are six times 2 and two times 0, so that two of 8 ranks have nothing
# to train. With shuffle=True it is the same number, of other samples. num_partitions instead of ratios repeats or keeps
# all, as documented. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet monai==1.6.1 torch==2.13.0 numpy==2.4.6
cat >"$folder/script.py" <<'PYTHON'
import monai
from monai.data import partition_dataset

assert monai.__version__ == "1.6.1", monai.__version__
CASES = (
    (1000, [0.7, 0.2, 0.1], [700, 200, 100]),
    (1000, [1, 1, 1], [333, 333, 333]),
    (10, [0.33, 0.33, 0.34], [3, 3, 3]),
    (1049, [1] * 100, [10] * 100),
    (12, [1] * 8, [2] * 6 + [0] * 2),
)
for count, ratios, expected in CASES:
    for shuffle in (False, True):
        parts = partition_dataset(list(range(count)), ratios=ratios, shuffle=shuffle)
        seen = {sample for part in parts for sample in part}
        assert [len(part) for part in parts] == expected, f"changed: {count} samples"
        assert len(seen) == sum(expected), "changed: repeated samples"
    ratio = ratios if len(ratios) < 9 else f"{len(ratios)} times 1"
    print(f"{count} samples by {ratio}: {count - len(seen)} are in no part, {expected.count(0)} parts are empty")
even = partition_dataset(list(range(12)), num_partitions=8)
assert {sample for part in even for sample in part} == set(range(12)), "changed: num_partitions"
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/script.py"
