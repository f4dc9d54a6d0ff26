#!/usr/bin/env bash
# grain 0.2.18: shuffling a MapDataset within windows repeats samples and loses others, if the last window is short.
#
# Seen with grain 0.2.18, numpy 2.4.6, Python 3.11: WindowShuffleMapDataset promises that each index corresponds
# to exactly one shuffled index. It permutes the last window as if it were full; what lies beyond the end is then
# read from the beginning again. Of 10 samples in windows of 4, and other numbers that are no multiple of the window,
# an epoch has the first ones twice and lacks some of the last. WindowShuffleIterDataset has each sample once.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet grain==0.2.18 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import grain
from grain.experimental import WindowShuffleIterDataset, WindowShuffleMapDataset

assert version("grain") == "0.2.18", version("grain")

for samples in (8, 10):
    data = grain.MapDataset.range(samples)
    epoch = list(WindowShuffleMapDataset(data, window_size=4, seed=1))
    print(f"{samples} samples in windows of 4: {epoch}")
    assert len(epoch) == samples
    assert (sorted(epoch) == list(range(samples))) == (samples == 8), "changed: MapDataset"
    once = list(WindowShuffleIterDataset(data.to_iter_dataset(), window_size=4, seed=1))
    assert sorted(once) == list(range(samples)), "changed: IterDataset"
PYTHON
