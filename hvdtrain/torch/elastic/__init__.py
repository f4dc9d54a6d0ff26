"""Horovod's elastic interface for PyTorch (see hvdtrain.core.elastic)."""

from __future__ import annotations

from hvdtrain.core.context import shutdown
from hvdtrain.core.elastic import ObjectState, run
from hvdtrain.core.horovod_api import init
from hvdtrain.torch.elastic.sampler import ElasticSampler
from hvdtrain.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "TorchState", "init", "run", "shutdown"]
