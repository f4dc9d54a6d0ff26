"""The strategies by name, for each framework."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain_compare.protocol.strategy import Strategy
from hvdtrain_compare.strategies import (
    accelerate,
    ddp,
    dp,
    fsdp2,
    horovod,
    hvdtrain,
    one,
    torch_postlocal,
)
from hvdtrain_compare.strategies.keras import horovod as keras_horovod
from hvdtrain_compare.strategies.keras import hvdtrain as keras_hvdtrain
from hvdtrain_compare.strategies.keras import (
    jax_distribution,
    mirrored,
    multiworker,
    ps_async,
    ps_sync,
)
from hvdtrain_compare.strategies.keras import one as keras_one

_REFERENCES = {"torch": one.STRATEGY, "keras": keras_one.STRATEGY}
_STRATEGIES: Mapping[str, Mapping[str, Strategy]] = {
    "torch": {
        module.STRATEGY.name: module.STRATEGY
        for module in (hvdtrain, horovod, ddp, fsdp2, dp, accelerate, torch_postlocal)
    },
    "keras": {
        module.STRATEGY.name: module.STRATEGY
        for module in (
            keras_hvdtrain,
            keras_horovod,
            mirrored,
            multiworker,
            ps_sync,
            ps_async,
            jax_distribution,
        )
    },
}


def reference_of(framework: str) -> Strategy:
    """Return what all others are compared with; it always runs."""
    return _REFERENCES[framework]


def strategies_of(framework: str) -> Mapping[str, Strategy]:
    """Return the strategies of a framework by name."""
    return _STRATEGIES[framework]


def find_strategy(framework: str, name: str) -> Strategy:
    """Return the strategy of this name, the reference included."""
    reference = reference_of(framework)
    return reference if name == reference.name else strategies_of(framework)[name]
