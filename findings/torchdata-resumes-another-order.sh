#!/usr/bin/env bash
# torchdata 0.11.0: a StatefulDataLoader resumes within a shuffled epoch in another order, if the sampler has a generator.
#
# Seen with torchdata 0.11.0, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11: its state holds how many samples were
# taken, and not the sampler's generator. A loader that is made again with the same seed and loads the state draws
# the permutation of the first epoch and skips that many: of the second epoch some samples come twice and others
# never, without a word. With RandomSampler(data, generator=...) and WeightedRandomSampler alike, with and without
# workers; shuffle=True resumes where it was.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 torchdata==0.11.0
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import torch
from torch.utils.data import RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

assert (version("torchdata"), torch.__version__[:6]) == ("0.11.0", "2.13.0")
SAMPLES = list(range(24))


def with_sampler():
    sampler = RandomSampler(SAMPLES, generator=torch.Generator().manual_seed(1))
    return StatefulDataLoader(SAMPLES, batch_size=4, sampler=sampler)


def with_shuffle():
    torch.manual_seed(1)
    return StatefulDataLoader(SAMPLES, batch_size=4, shuffle=True)


def second_epoch(make):
    """Return the samples of the second epoch before and after a restart, and without one."""
    loader = make()
    first = [sample for batch in loader for sample in batch.tolist()]
    uninterrupted = [sample for batch in loader for sample in batch.tolist()]
    assert sorted(first) == sorted(uninterrupted) == SAMPLES
    loader = make()
    list(loader)
    before = []
    for batch in loader:
        before += batch.tolist()
        if len(before) == 12:
            break
    again = make()
    again.load_state_dict(loader.state_dict())
    return before, [sample for batch in again for sample in batch.tolist()], uninterrupted


for make in (with_sampler, with_shuffle):
    before, after, uninterrupted = second_epoch(make)
    twice, never = sorted(set(before) & set(after)), sorted(set(SAMPLES) - {*before, *after})
    print(f"{make.__name__}: 12 samples, restart, {len(after)} samples: twice {twice}, never {never}")
    assert len(after) == 12 and before == uninterrupted[:12]
    if make is with_sampler:
        assert twice and never and after != uninterrupted[12:], "changed: resumed in the same order"
    else:
        assert not twice and not never and after == uninterrupted[12:], "changed: shuffle"
PYTHON
