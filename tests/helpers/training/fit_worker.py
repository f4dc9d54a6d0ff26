"""A script of a user's that trains a function: fit_worker.py OUT."""

from __future__ import annotations

import sys

import pytest
from point_recipes import recipe

from hvdtrain.train import fit

with pytest.raises(TypeError, match="'epoch'"):
    fit(recipe, epoch=2)
summary = fit(recipe, set={"width": 5}, epochs=2, global_batch_size=8, lr_scaling="none",
              dtype="float64", out=sys.argv[1], quiet=True)  # fmt: skip
assert summary is not None
print(f"{summary.world_size} ranks, loss {summary.final['loss']:.12f}")
