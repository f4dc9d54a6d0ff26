#!/usr/bin/env bash
# datasets 5.2.0: columns of float64 are read as float32 in the format torch, and lists of them in numpy's as well.
#
# Seen with datasets 5.2.0, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11: the features say float64, and so do the
# formats pandas, arrow, and plain Python. with_format("torch") makes float32 of them: times in seconds are moved by up
# to a minute, so that events coincide, coordinates by decimetres, and differences of large numbers are gone.
# with_format("numpy") keeps a plain column and rounds a column of lists. `dtype=torch.float64` as an option of the
# format keeps floats, and turns integers into floats too. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 torch==2.13.0 numpy==2.4.6
cat >"$folder/script.py" <<'PYTHON'
import datasets
import torch

assert datasets.__version__ == "5.2.0", datasets.__version__
TIME, ROUNDED = 1767225601.5, 1767225600.0
data = datasets.Dataset.from_dict({"time": [TIME], "times": [[TIME, TIME + 1]], "id": [2**53 + 1]})
assert data.features["time"].dtype == data.features["times"].feature.dtype == "float64", "changed: features"
rows = {kind: data.with_format(kind)[0] for kind in (None, "numpy", "torch")}
seen = {kind: (float(row["time"]), [float(each) for each in row["times"]], int(row["id"])) for kind, row in rows.items()}
expected = {
    None: (TIME, [TIME, TIME + 1], 2**53 + 1),
    "numpy": (TIME, [ROUNDED, ROUNDED], 2**53 + 1),
    "torch": (ROUNDED, [ROUNDED, ROUNDED], 2**53 + 1),
}
for kind, row in seen.items():
    print(f"format {kind}: time {row[0]}, times {row[1]}, id {row[2]}")
    assert row == expected[kind], f"changed: {kind}"
batch = data.with_format("torch")[:]["time"]
assert batch.dtype == torch.float32, "changed: batches"
row = data.with_format("torch", dtype=torch.float64)[0]
assert (row["time"].item(), row["id"].dtype) == (TIME, torch.float64), "changed: dtype"
PYTHON
HF_HUB_OFFLINE=1 HF_HOME="$folder" "$folder/venv/bin/python" -W ignore "$folder/script.py"
