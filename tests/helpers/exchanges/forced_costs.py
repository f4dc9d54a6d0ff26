"""Measurements that decide which exchange is chosen for each gradient."""

from collections.abc import Mapping

import pytest

from hvdtrain.core.exchanges import auto
from hvdtrain.core.exchanges.costs import GradientCost, Measured, Method
from hvdtrain.core.exchanges.measured_costs import Measurement
from hvdtrain.core.gradients.bucket_size import AllreduceCost
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.plan import BucketPlan

# Bytes per second of a link that is worth any compression.
SLOW = 1e3


def forced_costs(plan: BucketPlan, largest: Mapping[str, int], bandwidth: float = SLOW) -> Measured:
    """Return measurements in which each exchange saves nearly all of one gradient."""
    sizes = [float(spec.nbytes) for spec in plan.specs]
    methods = [Method("average", 1, 0.0, tuple(GradientCost(0.0, size) for size in sizes))]
    for name, index in largest.items():
        costs = [GradientCost(1e-3, size) for size in sizes]
        costs[index] = GradientCost(1e-3, 0.01 * sizes[index])
        methods.append(Method(name, 1, 1e-4, tuple(costs)))
    link, ready = AllreduceCost(1e-4, bandwidth), (0.0,) * len(plan.buckets)
    return Measured(2, 1, link, AllreduceCost(0.0, float("inf")), ready, tuple(methods))


class _Forced(Measurement):
    """Measures, and has the first gradient sent in half the bytes, whatever that gave."""

    def run(self, communicators: Communicators) -> Measured:
        super().run(communicators)
        return forced_costs(self.plan, {"half": 0})


def force_choice(patches: pytest.MonkeyPatch) -> None:
    """Have exchange "auto:allow=half" choose alike in every run, however busy the machine is."""
    patches.setattr(auto, "Measurement", _Forced)
