"""`Trainer(sync_batchnorm=True)`: batch normalization over the batches of all ranks."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

import hvdtrain.torch as hvd
from hvdtrain.lightning.library import LayerSync

_SHARED = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


class HvdSyncBatchNorm(LayerSync):
    """Replaces batch normalization by `hvdtrain.torch.SyncBatchNorm` while a model is trained."""

    def __init__(self) -> None:
        self._originals: dict[torch.nn.Module, torch.nn.Module] = {}

    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model with synchronized layers, which have the parameters of the others."""
        for parent in list(model.modules()):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, _BatchNorm) and not isinstance(layer, hvd.SyncBatchNorm):
                    synchronized = _synchronized(layer)
                    self._originals[synchronized] = layer
                    setattr(parent, name, synchronized)
        return model

    def revert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model with its own layers again, which have what was learned."""
        for parent in list(model.modules()):
            for name, layer in list(parent.named_children()):
                original = self._originals.pop(layer, None)
                if original is not None:
                    _share(layer, original)
                    setattr(parent, name, original)
        return model


def _synchronized(layer: _BatchNorm) -> hvd.SyncBatchNorm:
    made = hvd.SyncBatchNorm(
        layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats
    )
    _share(layer, made)
    return made


def _share(source: torch.nn.Module, target: torch.nn.Module) -> None:
    for name in _SHARED:
        setattr(target, name, getattr(source, name))
    target.train(source.training)
