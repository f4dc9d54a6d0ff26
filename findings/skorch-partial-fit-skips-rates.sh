#!/usr/bin/env bash
# skorch 1.4.0: each further call of partial_fit begins with the rate of the next step of the schedule, and skips one.
#
# Seen with skorch 1.4.0, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11: LRScheduler makes a new scheduler for each call, at the
# epoch that the history has, and PyTorch takes a step when it makes one. The optimizer has taken that step already, at the
# end of the last epoch. Rates that are halved in each epoch, 1, 1/2, 1/4, 1/8 in one call, are 1, 1/4, 1/16, 1/64 in four
# calls of an epoch each, and those of a schedule by batches fall as well. So a net that is trained by pieces of the data, or
# longer after a look at it, learns at lower rates than its schedule says. Without LRScheduler four calls are four
# epochs. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet skorch==1.4.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import numpy as np
import skorch
import torch
from skorch.callbacks import LRScheduler

assert (skorch.__version__, torch.__version__[:6]) == ("1.4.0", "2.13.0")
samples, targets = np.ones((8, 1), "float32"), np.zeros((8, 1), "float32")


class Rates(skorch.callbacks.Callback):
    """Note the rate with which each step is taken."""

    def on_train_begin(self, net, **_):
        self.seen = getattr(self, "seen", [])

    def on_grad_computed(self, net, **_):
        self.seen.append(net.optimizer_.param_groups[0]["lr"])


def rates(calls, epochs, **schedule):
    noted = Rates()
    callbacks = [("rates", noted), ("schedule", LRScheduler(**schedule))]
    net = skorch.NeuralNetRegressor(torch.nn.Linear, module__in_features=1, module__out_features=1, lr=1.0, batch_size=4,
                                    max_epochs=epochs, train_split=None, verbose=0, callbacks=callbacks)
    for _ in range(calls):
        net.partial_fit(samples, targets)
    return [round(rate, 6) for rate in noted.seen]


halved = {"policy": "StepLR", "step_size": 1, "gamma": 0.5}
for every, steps in (("epoch", 2), ("batch", 1)):
    once, pieces = rates(1, 4, step_every=every, **halved), rates(4, 1, step_every=every, **halved)
    print(f"halved in each {every}: rates of the steps of one call {once}; of four calls {pieces}")
    assert once == [round(0.5 ** (step // steps), 6) for step in range(8)], "changed: one call"
    skipped = [step // 2 + step // steps for step in range(8)]  # one more for each call
    assert pieces == [round(0.5**halvings, 6) for halvings in skipped], "changed: four calls"
PYTHON
