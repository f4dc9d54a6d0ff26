#!/usr/bin/env bash
# Keras 3.15.1: a fit that BackupAndRestore continues stops later, and keeps worse weights, than one that was not interrupted.
#
# Seen with Python 3.11, PyTorch 2.13.0 as the backend. BackupAndRestore saves weights, optimizer and epoch, but nothing of the
# other callbacks. EarlyStopping begins anew: what it knew as the best loss, its weights and its count of epochs
# without progress are lost. With validation losses 5, 1, 2, 3, 4, 5, 6, 7 and a patience of 3, the whole run
# ends after epoch 4 with the weights of epoch 1; continued in epoch 4, it ends after epoch 7 with those of epoch 4.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 torch==2.13.0 numpy==2.3.5
cat >"$folder/fit.py" <<'PYTHON'
import sys

import keras
import numpy as np

LOSSES = [5, 1, 2, 3, 4, 5, 6, 7, 8, 9]
keras.utils.set_random_seed(0)
x = np.random.rand(64, 4).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")


class Interrupted(keras.callbacks.Callback):
    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            print(f"interrupted before epoch {epoch}", flush=True)
            sys.exit()

    def on_epoch_end(self, epoch, logs):
        logs["val_loss"] = LOSSES[epoch]


stopping = keras.callbacks.EarlyStopping("val_loss", patience=3, mode="min", restore_best_weights=True)
backup = keras.callbacks.BackupAndRestore(sys.argv[1])
callbacks = [Interrupted(int(sys.argv[2])), stopping, backup]
model.fit(x, x.sum(1, keepdims=True), epochs=10, verbose=0, callbacks=callbacks)
print(f"stopped after epoch {stopping.stopped_epoch}, kept weights of epoch {stopping.best_epoch}, loss {stopping.best}")
PYTHON
for run in "whole -1" "parts 4" "parts -1"; do
    read -r name epoch <<<"$run"
    KERAS_BACKEND=torch "$folder/venv/bin/python" "$folder/fit.py" "$folder/$name" "$epoch" >>"$folder/output" 2>>"$folder/errors"
done
diff "$folder/output" - <<'EXPECTED' || { echo "changed:"; cat "$folder/output" "$folder/errors"; exit 1; }
stopped after epoch 4, kept weights of epoch 1, loss 1
interrupted before epoch 4
stopped after epoch 7, kept weights of epoch 4, loss 4
EXPECTED
cat "$folder/output"
