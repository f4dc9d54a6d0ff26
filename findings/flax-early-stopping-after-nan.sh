#!/usr/bin/env bash
# Flax 0.12.8: if the first validation loss is NaN, EarlyStopping ends a training whose losses fall.
#
# Seen with flax 0.12.8, jax 0.10.2 (CPU), numpy 2.4.6, Python 3.11: the first loss is taken as the best, whatever it is, and no
# number is less than NaN, so that none of the later ones is an improvement: with a patience of 2 and the losses NaN, 4, 3, 2
# it stops at the 2, and has_improved, by which one saves the best checkpoint, is true for the NaN alone. A NaN that comes
# later is passed over. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet flax==0.12.8 jax==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" -W error - <<'PYTHON'
import flax
from flax.training.early_stopping import EarlyStopping

assert flax.__version__ == "0.12.8", flax.__version__
nan = float("nan")

for losses, stops in (([5.0, 4.0, 3.0, 2.0], False), ([5.0, nan, 3.0, 2.0], False), ([nan, 4.0, 3.0, 2.0], True)):
    stopping, improved = EarlyStopping(patience=2), []
    for loss in losses:
        stopping = stopping.update(loss)
        improved.append(stopping.has_improved)
    print(f"losses {losses}: improved {improved}, should_stop {stopping.should_stop}, best {stopping.best_metric}")
    assert stopping.should_stop is stops, "changed: should_stop"
    assert any(improved[1:]) is not stops, "changed: has_improved"
PYTHON
