"""Functions on the ranks of a Spark cluster.

It needs pyspark, and executors with this package, torch and cloudpickle. Ranks meet by the engine
gloo, or nccl if each has a GPU.
"""

from __future__ import annotations

from hvdtrain.spark.distributor import Distributor
from hvdtrain.spark.job import run

__all__ = ["Distributor", "run"]
