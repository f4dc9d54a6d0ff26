#!/usr/bin/env bash
# orbax-checkpoint 0.12.8: arrays under the keys "a.b" and "a" -> "b" are saved in one place, and one of them is lost.
#
# Seen with orbax-checkpoint 0.12.8, jax 0.10.2 (CPU), numpy 2.4.6, Python 3.11: each array goes to a place whose name is its
# keys joined by dots. Weights under flat names, as "head.bias", beside a tree that has "bias" in "head", as for a frozen or
# averaged copy in the same dictionary, are written there both: one of the two arrays comes back twice, whichever was
# written last, so that it may be the other one in the next checkpoint. The tree that is restored has all keys, and nothing is
# said unless the shapes differ. StandardCheckpointer and PyTreeCheckpointer do the same. "head/bias" is kept apart.
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

import jax.numpy as jnp
import orbax.checkpoint as ocp

assert version("orbax-checkpoint") == "0.12.8"
logging.disable(logging.CRITICAL)


def restored(kind, tree):
    path = mkdtemp(dir=sys.argv[1]) + "/state"
    with kind() as checkpointer:
        checkpointer.save(path, tree)
        if kind is ocp.StandardCheckpointer:
            checkpointer.wait_until_finished()
        return checkpointer.restore(path)


for kind in (ocp.StandardCheckpointer, ocp.PyTreeCheckpointer):
    for key in ("head.bias", "head/bias"):
        tree = restored(kind, {key: jnp.ones(1), "head": {"bias": jnp.zeros(1)}})
        flat, nested = tree[key].item(), tree["head"]["bias"].item()
        print(f'{kind.__name__}: {key} was 1 and is {flat}; head -> bias was 0 and is {nested}', flush=True)
        assert (flat == nested) if key == "head.bias" else ((flat, nested) == (1, 0)), f"changed: {key}"
PYTHON
