"""How much the jobs train; without imports, which would count as time of a restart."""

from __future__ import annotations

RANKS = 3
BATCH = 32  # samples of each rank
STEPS = 120  # of three ranks, in one epoch
SAMPLES = RANKS * BATCH * STEPS
