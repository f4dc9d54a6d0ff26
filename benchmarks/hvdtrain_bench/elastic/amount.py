"""How much work a job has, the same for every library; what starts jobs needs no framework."""

from __future__ import annotations

__all__ = ["BATCH", "RANKS", "SAMPLES", "STEPS"]

RANKS = 3
BATCH = 32  # samples of each rank
STEPS = 120  # of three ranks, in one epoch
SAMPLES = RANKS * BATCH * STEPS
