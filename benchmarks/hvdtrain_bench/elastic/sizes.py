"""How much a job computes, without torch: the command line needs no more."""

from __future__ import annotations

RANKS = 3
BATCH = 32  # samples of each rank
STEPS = 120  # of three ranks, in one epoch
SAMPLES = RANKS * BATCH * STEPS
