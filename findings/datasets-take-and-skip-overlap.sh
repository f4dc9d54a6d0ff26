#!/usr/bin/env bash
# datasets 5.2.0: take(n) and skip(n) overlap if their DataLoaders have different numbers of workers.
#
# Seen with datasets 5.2.0, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11: the documentation splits a stream into
# validation and training data with take(n) and skip(n), "the first n" elements and the rest. Workers divide
# n among themselves, and each takes or skips its part from its own shards. Of 20 samples in 4 shards,
# take(7) without workers is 0 to 6; skip(7) with two workers trains on 4, which is among them, and never on 7;
# with three workers on 3, 4 and never on 10, 11. So training sees samples of the validation, whose
# size stays right; nothing is said. Equal numbers of workers divide the samples without an overlap.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 torch==2.13.0 numpy==2.4.6
cat >"$folder/script.py" <<'PYTHON'
import datasets
from torch.utils.data import DataLoader

assert datasets.__version__ == "5.2.0", datasets.__version__


def numbers(stream, workers):
    return sorted(int(sample["i"]) for sample in DataLoader(stream, batch_size=None, num_workers=workers))


if __name__ == "__main__":
    stream = datasets.Dataset.from_dict({"i": list(range(20))}).to_iterable_dataset(num_shards=4)
    validation = numbers(stream.take(7), 0)
    assert validation == list(range(7)), "changed: take without workers"
    for workers, both, neither in ((0, [], []), (2, [4], [7]), (3, [3, 4], [10, 11])):
        assert numbers(stream, workers) == list(range(20)), "changed: the whole stream"
        training = numbers(stream.skip(7), workers)
        seen = sorted({*validation} & {*training}), sorted({*range(20)} - {*validation} - {*training})
        print(f"take(7) without workers, skip(7) with {workers}: {len(training)} train; in both {seen[0]}, in neither {seen[1]}")
        assert len(training) == 13 and seen == (both, neither), "changed: skip"
        same = numbers(stream.take(7), workers)
        assert sorted(same + training) == list(range(20)), "changed: equal numbers of workers"
PYTHON
HF_HOME="$folder/cache" HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/script.py"
