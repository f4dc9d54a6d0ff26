#!/usr/bin/env bash
# Accelerate 1.15.0 and Lightning 2.6.6: the last, shorter window of accumulated batches makes a smaller step.
#
# Seen with accelerate 1.15.0, lightning 2.6.6, torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11, one process: with
# accumulation over 4 batches and 5 batches in the epoch, both take a step after batch 4 and after batch 5.
# The loss is divided by 4 in both, so that batch 5 moves the weights a quarter as far as a step of one
# batch would: 0.25 instead of 1. So samples count less by where the shuffled epoch happens to put
# them, and a data set shorter than the window trains at a fraction of its rate.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet accelerate==1.15.0 lightning==2.6.6 torch==2.13.0 numpy==2.3.5
PYTHONWARNINGS=ignore "$folder/venv/bin/python" - <<'PYTHON'
import logging

import accelerate
import lightning
import torch
from torch.utils.data import DataLoader

assert (accelerate.__version__, lightning.__version__) == ("1.15.0", "2.6.6")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
WINDOW, BATCHES = 4, 5
batches = DataLoader(torch.ones(BATCHES, 1), batch_size=1)


class Model(lightning.LightningModule):
    """The gradient of its loss is -1 in every batch: the weight is how far the steps went."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.zeros(1)), []

    def forward(self, batch):
        return -(self.weight * batch).mean()

    def training_step(self, batch, index):
        return self(batch)

    def on_train_batch_end(self, *arguments):
        self.seen.append(self.weight.item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


model = Model()
quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
trainer = lightning.Trainer(max_epochs=1, accumulate_grad_batches=WINDOW, accelerator="cpu", **quiet)
trainer.fit(model, batches)
by_lightning = model.seen

accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
model = Model()
model, optimizer, batches = accelerator.prepare(model, model.configure_optimizers(), batches)
by_accelerate = []
for batch in batches:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch))
        optimizer.step()
        optimizer.zero_grad()
    by_accelerate.append(model.weight.item())

for name, seen in (("Lightning", by_lightning), ("Accelerate", by_accelerate)):
    print(f"{name}, weight after each batch: {seen}")
    assert seen == [0.0, 0.0, 0.0, 1.0, 1.25], f"changed: {name}"
PYTHON
