"""The training state of a script."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.collective import collective
from hvdtrain.core.elastic import ObjectState
from hvdtrain.core.horovod_api import rank
from hvdtrain.torch.elastic.sampler import ElasticSampler
from hvdtrain.torch.functions import (
    broadcast_module,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_stateful,
    snapshot,
)

__all__ = ["TorchState"]


class TorchState(ObjectState):
    """Models, optimizers, samplers and values that can be committed, restored and synchronized.

    Args:
        model: value of the attribute `model`.
        optimizer: value of the attribute `optimizer`.
        kwargs: values of further attributes. For those with state_dict() and load_state_dict(),
            such as learning rate schedulers, that state is saved and sent; for others the object.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs |= {"model": model, "optimizer": optimizer}
        self._stateful = [name for name in kwargs if _is_stateful(kwargs[name])]
        for name in self._stateful:
            setattr(self, name, kwargs.pop(name))
        super().__init__(broadcast_object, rank, **kwargs)

    def save(self) -> None:
        """Copy all states in memory (local)."""
        self._saved_states = {
            name: snapshot(getattr(self, name).state_dict()) for name in self._stateful
        }
        super().save()

    def restore(self) -> None:
        """Restore the last commit() or sync(), or else the initial state (local)."""
        for name, saved in self._saved_states.items():
            # An optimizer modifies the tensors that it loads.
            getattr(self, name).load_state_dict(snapshot(saved))
        super().restore()

    @collective
    def sync(self) -> None:
        """Broadcast rank 0's state and commit it (collective).

        Samplers also collect what the other ranks have processed.
        """
        for name in self._stateful:
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                broadcast_module(value, root_rank=0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root_rank=0)
            elif isinstance(value, ElasticSampler):
                value.sync()
            else:
                broadcast_stateful(value, 0, f"state of {type(value).__name__}")
        super().sync()


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
