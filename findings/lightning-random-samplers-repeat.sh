#!/usr/bin/env bash
# Lightning 2.6.6: with a random sampler of the program's own, ranks train some samples twice and others never.
#
# Seen with Python 3.11, PyTorch 2.13.0, DDP on 2 CPU processes: a DataLoader with SubsetRandomSampler of 64 samples, as
# for cross-validation. Lightning puts its DistributedSamplerWrapper around it, in which every rank
# draws an order of its own, from its own generator, and takes each second sample of that. If the
# generators differ, the ranks' shares overlap: 64 samples are trained in an epoch, but not 64
# different ones. Nothing is said. Accelerate 1.15.0, which divides such batches too, gives each of
# the 64 once in the same program, as its processes agree on a seed first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 lightning==2.6.6 accelerate==1.15.0
cat >"$folder/trains.py" <<'PYTHON'
import sys

import lightning
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, SubsetRandomSampler


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.numbers = torch.nn.Linear(1, 1), []

    def training_step(self, batch, _):
        self.numbers += batch.tolist()
        return self.layer(batch.float()[:, None]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

    def on_train_epoch_end(self):
        count(self.all_gather(torch.tensor(self.numbers)), self.global_rank)


def count(numbers, rank):
    if rank == 0:
        numbers = numbers.flatten().tolist()
        print(f"{sys.argv[1]}: {len(numbers)} samples, all different: {len(set(numbers)) == len(numbers)}", flush=True)


def loader(rank):
    torch.manual_seed(1000 + rank)
    return DataLoader(range(100), batch_size=4, sampler=SubsetRandomSampler(range(64)))


if sys.argv[1] == "Lightning":
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **quiet)
    trainer.fit(Model(), loader(trainer.global_rank))
else:
    accelerator = Accelerator(cpu=True)
    numbers = torch.cat([*accelerator.prepare(loader(accelerator.process_index))])
    count(accelerator.gather(numbers), accelerator.process_index)
PYTHON
while read -r library expected; do
    "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/trains.py" "$library" </dev/null >"$folder/output" 2>&1
    grep "^$library: 64 samples, all different: $expected" "$folder/output" || { echo "changed:"; cat "$folder/output"; exit 1; }
done <<'CASES'
Lightning False
Accelerate True
CASES
