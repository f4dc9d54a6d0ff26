"""Outputs of a model, computed by all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.data.sampling.sharding import Indices
from hvdtrain.errors import UsageError
from hvdtrain.train.loop.agree import call_everywhere
from hvdtrain.train.loop.gather import gather_rows

__all__ = ["in_pieces", "predict_together"]

Array = npt.NDArray[Any]


def predict_together(chunks: Sequence[Indices], outputs_of: Callable[[Indices], Array]) -> Array:
    """Return the outputs of all samples, in order, on every rank (collective).

    Args:
        chunks: the samples of this rank, by number; together the ranks have each once.
        outputs_of: computes the outputs of a chunk, [samples, ...].

    Raises:
        UsageError: on every rank, the model does not take such inputs.
    """
    parts = call_everywhere(partial(_compute, chunks, outputs_of))
    indices = np.concatenate([np.zeros(0, np.int64), *chunks])
    rows = np.concatenate(parts) if parts else np.zeros((0,), np.float32)
    (outputs,) = gather_rows(indices, [rows])
    return outputs


def in_pieces(samples: Indices, most: int) -> list[Indices]:
    """Cut samples into pieces of so many at most."""
    return [samples[start : start + most] for start in range(0, len(samples), most)]


def _compute(chunks: Sequence[Indices], outputs_of: Callable[[Indices], Array]) -> list[Array]:
    try:
        return [outputs_of(chunk) for chunk in chunks]
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UsageError(f"the model does not take these inputs: {reason}") from error
