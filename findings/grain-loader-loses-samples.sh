#!/usr/bin/env bash
# grain 0.2.18: without drop_remainder, the loaders of several processes leave samples out all the same.
#
# Seen with grain 0.2.18, numpy 2.4.6, Python 3.11: ShardOptions says that drop_remainder=False, the default, gives
# the remainder to the first shards. Of 23 samples, two processes read 11 each in an epoch, and nobody reads one:
# the last with SequentialSampler, one in the middle with IndexSampler. An evaluation of one epoch misses it.
# Slices of a MapDataset (dataset[rank::size]) have all samples.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet grain==0.2.18 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import grain.python as grain

assert version("grain") == "0.2.18", version("grain")
SAMPLES = list(range(23))


def read(size, sampler_type, **how):
    """Return what each of several processes reads in one epoch."""
    shards = [grain.ShardOptions(rank, size, drop_remainder=False) for rank in range(size)]
    samplers = [sampler_type(23, shard_options=shard, seed=1, **how) for shard in shards]
    return [list(grain.DataLoader(data_source=SAMPLES, sampler=each)) for each in samplers]


def missing(parts):
    assert len({sample for part in parts for sample in part}) == sum(map(len, parts)), "changed: twice"
    return sorted(set(SAMPLES) - {sample for part in parts for sample in part})


for size in (2, 3):
    for name, sampler_type, how in (
        ("IndexSampler", grain.IndexSampler, {"num_epochs": 1}),
        ("IndexSampler, shuffled", grain.IndexSampler, {"num_epochs": 1, "shuffle": True}),
        ("SequentialSampler", grain.SequentialSampler, {}),
    ):
        parts = read(size, sampler_type, **how)
        print(f"{size} processes, {name}: {[len(part) for part in parts]}, missing {missing(parts)}")
        assert [len(part) for part in parts] == [23 // size] * size, "changed: numbers of samples"
        assert len(missing(parts)) == 23 % size, "changed: missing"
    assert not missing([list(grain.MapDataset.range(23)[rank::size]) for rank in range(size)])
PYTHON
