"""The messages between workers and servers: tags and headers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

# Elements of a shard, or of all shards, float32 or float64, [n].
Flat = npt.NDArray[Any]
Header = npt.NDArray[np.int64]

# Tags. A worker sends requests and gradients, a server answers and weights.
REQUEST, GRADIENT, ANSWER, WEIGHTS = range(4)

# Kinds of requests.
PULL, PUSH = range(2)


def empty_request() -> Header:
    """Return memory for a request: kind, samples in the round, version of the weights."""
    return np.zeros(3, np.int64)


def empty_answer() -> Header:
    """Return memory for an answer to a pull: whether the round is over, version of the weights."""
    return np.zeros(2, np.int64)
