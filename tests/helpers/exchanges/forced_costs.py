"""Measurements that decide which exchange is chosen for each gradient."""

from collections.abc import Mapping

import numpy as np
import pytest

from hvdtrain.core.exchanges import auto
from hvdtrain.core.exchanges.costs import Measured
from hvdtrain.core.exchanges.measured_costs import Measurement
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.plan import AllreduceCost, BucketPlan

# Bytes per second of a link that is worth any compression.
SLOW = 1e3


def forced_costs(plan: BucketPlan, largest: Mapping[str, int], bandwidth: float = SLOW) -> Measured:
    """Return measurements in which each exchange saves nearly all of one gradient."""
    sizes, count = np.array([float(spec.nbytes) for spec in plan.specs]), 1 + len(largest)
    seconds, nbytes = np.full((count, len(sizes)), 1e-3), np.tile(sizes, (count, 1))
    seconds[0] = 0.0
    for number, index in enumerate(largest.values(), 1):
        nbytes[number, index] *= 0.01
    link, node = AllreduceCost(1e-4, bandwidth), AllreduceCost(0.0, float("inf"))
    runs = [1] * count, [0.0] + [1e-4] * (count - 1)
    ready, names = [0.0] * len(plan.buckets), ["average", *largest]
    return Measured(2, 1, link, node, ready, names, *runs, seconds, nbytes)


class _Forced(Measurement):
    """Measures, and has the first gradient sent in half the bytes, whatever that gave."""

    def run(self, communicators: Communicators) -> Measured:
        super().run(communicators)
        return forced_costs(self.plan, {"half": 0})


def force_choice(patches: pytest.MonkeyPatch) -> None:
    """Have exchange "auto:allow=half" choose alike in every run, however busy the machine is."""
    patches.setattr(auto, "Measurement", _Forced)
