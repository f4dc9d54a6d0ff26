"""The reduction of sparse gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hvdtrain.core.gradient_settings import GradientSettings
from hvdtrain.torch.operations.allgather import sparse_allreduce_async

__all__ = ["reduce_sparse"]


def reduce_sparse(
    counts: Sequence[int],
    own: Mapping[int, torch.Tensor],
    named: Sequence[tuple[str, torch.nn.Parameter]],
    settings: GradientSettings,
    weighted: bool,
) -> None:
    """Set the gradients of parameters to the reduced sparse gradients of all ranks (collective).

    Args:
        counts: number of ranks with a sparse gradient, for each parameter.
        own: sparse gradients of this rank, by the parameter's index.
        named: name and parameter.
        settings: settings, equal on all ranks.
        weighted: whether a sample_weight was set.

    Raises:
        ValueError: there are sparse gradients, and a sample_weight was set.
    """
    indices = [index for index, count in enumerate(counts) if count]
    if indices and weighted:
        raise ValueError(
            f"the gradient of {named[indices[0]][0]!r} is sparse, which sample_weight does "
            "not support: use sparse_as_dense=True"
        )
    for index in indices:
        _reduce_one(own.get(index), *named[index], settings)


def _reduce_one(
    own: torch.Tensor | None, name: str, parameter: torch.nn.Parameter, settings: GradientSettings
) -> None:
    if own is None:
        device = parameter.device
        own = torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64, device=device),
            torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=device),
            parameter.shape,
            device=device,
            check_invariants=device.type == "cpu",  # on a GPU the host would wait for it
        )
    handle = sparse_allreduce_async(
        own.coalesce(), f"sparse gradient of {name}", settings.total, settings.process_set
    )
    parameter.grad = handle.wait().coalesce()
