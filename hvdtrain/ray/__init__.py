"""Functions on the ranks of a Ray cluster.

It needs ray, and nodes with this package, torch and cloudpickle. Ranks meet by the engine gloo, or
nccl if each has a GPU.
"""

from __future__ import annotations

from hvdtrain.ray.job import run

__all__ = ["run"]
