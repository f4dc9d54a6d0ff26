#!/usr/bin/env bash
# orbax-checkpoint 0.12.8: after a NaN the best checkpoint is deleted, and one with NaN may be kept as the best.
#
# Seen with orbax-checkpoint 0.12.8, jax 0.10.2 (CPU), numpy 2.4.6, Python 3.11: CheckpointManager with best_fn and max_to_keep
# sorts its checkpoints by their metric. A NaN is neither less nor greater than any, so that the order around it is
# that of the steps. Of the losses 3, 1, NaN, 2 it keeps the step with 2, says that it is the best, and deletes that with 1; of
# 3, 2, 1, NaN it keeps the weights that gave NaN, and best_step() returns them. It is the same for a metric that shall
# be large. What a run that diverged should go back to is gone. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet orbax-checkpoint==0.12.8 jax==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" -W ignore - "$folder" <<'PYTHON'
import logging
import sys
from importlib.metadata import version
from tempfile import mkdtemp

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

assert (version("orbax-checkpoint"), jax.__version__) == ("0.12.8", "0.10.2")
logging.disable(logging.CRITICAL)
nan = float("nan")


def kept(metrics, mode):
    """The metrics of the checkpoints that are left, and that of the best one."""
    options = ocp.CheckpointManagerOptions(max_to_keep=1, best_fn=lambda each: each["metric"], best_mode=mode)
    with ocp.CheckpointManager(mkdtemp(dir=sys.argv[1]), options=options) as manager:
        for step, metric in enumerate(metrics):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.ones(1)}), metrics={"metric": metric})
        manager.wait_until_finished()
        return [metrics[step] for step in manager.all_steps()], metrics[manager.best_step()]


for metrics, mode, expected in (
    ([3.0, 1.0, 4.0, 2.0], "min", 1.0),
    ([3.0, 1.0, nan, 2.0], "min", 2.0),
    ([3.0, 2.0, 1.0, nan], "min", nan),
    ([3.0, 9.0, 4.0, 2.0], "max", 9.0),
    ([3.0, 9.0, nan, 2.0], "max", 2.0),
    ([3.0, 9.0, 4.0, nan], "max", nan),
):
    left, best = kept(metrics, mode)
    print(f"metrics {metrics}, best_mode {mode}: kept is {left}, the best is {best}", flush=True)
    assert str(left) == str([expected]) and str(best) == str(expected), "changed"
PYTHON
