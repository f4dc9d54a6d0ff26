#!/usr/bin/env bash
# Equinox 0.13.8 and orbax-checkpoint 0.12.8: a number that was saved as 0.3 is loaded as 0 if the new tree holds an integer.
#
# Seen with equinox 0.13.8, orbax-checkpoint 0.12.8, jax 0.10.2 (CPU), numpy 2.4.6, Python 3.11: tree_deserialise_leaves and
# StandardCheckpointer load into a tree of the same form, which a program makes from its defaults. Where that tree has
# a Python number, they make its type of what was saved: a rate, temperature or dropout whose default is written as 1, and
# was 0.3 when it was saved, comes back as 0; with Equinox, in place of False as True. Arrays are treated otherwise:
# Equinox refuses one of another type or shape, and Orbax one of another shape. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet equinox==0.13.8 orbax-checkpoint==0.12.8 jax==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" -W ignore - "$folder" <<'PYTHON'
import logging
import sys
from importlib.metadata import version
from tempfile import mkdtemp

import equinox
import jax.numpy as jnp
import orbax.checkpoint as ocp

assert (version("equinox"), version("orbax-checkpoint")) == ("0.13.8", "0.12.8")
logging.disable(logging.CRITICAL)


def by_equinox(saved, into):
    path = mkdtemp(dir=sys.argv[1]) + "/state"
    equinox.tree_serialise_leaves(path, saved)
    return equinox.tree_deserialise_leaves(path, into)


def by_orbax(saved, into):
    path = mkdtemp(dir=sys.argv[1]) + "/state"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, into)


for load, default, expected in (
    (by_equinox, 1.0, 0.3),
    (by_equinox, 1, 0),
    (by_equinox, False, True),
    (by_orbax, 1.0, 0.3),
    (by_orbax, 1, 0),
):
    loaded = load({"rate": 0.3}, {"rate": default})["rate"]
    print(f"{load.__name__}: 0.3 is loaded into {default!r} as {loaded!r}", flush=True)
    assert type(loaded) is type(expected) and loaded == expected, "changed: numbers"

for load, array in ((by_equinox, jnp.ones(1, int)), (by_equinox, jnp.ones(2)), (by_orbax, jnp.ones(2))):
    try:
        load({"rate": jnp.full(1, 0.3)}, {"rate": array})
    except (RuntimeError, ValueError) as error:
        print(f"{load.__name__}: the array 0.3 into {array.dtype}{list(array.shape)}: {type(error).__name__}", flush=True)
    else:
        raise SystemExit("changed: arrays")
PYTHON
