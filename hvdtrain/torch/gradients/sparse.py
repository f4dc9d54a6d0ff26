"""The reduction of sparse gradients."""

from __future__ import annotations

import torch

from hvdtrain.collective import collective
from hvdtrain.core.gradient_settings import GradientSettings
from hvdtrain.core.gradients.step_info import StepInfo
from hvdtrain.torch.operations.allgather import sparse_allreduce_async


@collective
def reduce_sparse(
    own: torch.Tensor | None,
    name: str,
    parameter: torch.nn.Parameter,
    settings: GradientSettings,
    info: StepInfo,
) -> torch.Tensor:
    """Return the total of all ranks' sparse gradients, of rows and coalesced."""
    if own is None:
        device = parameter.device
        own = torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64, device=device),
            torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=device),
            parameter.shape,
            device=device,
            check_invariants=device.type == "cpu",  # on a GPU the host would wait for it
        )
    elif own.sparse_dim() != 1:  # gather() gives elements, and another rank may have rows
        own = own.to_dense().to_sparse(1)
    if info.weighted:
        own = own * info.weigh()
    handle = sparse_allreduce_async(
        own.coalesce(), f"sparse gradient of {name}", settings.total, settings.process_set
    )
    total: torch.Tensor = handle.wait().coalesce()
    return total
