"""What a recipe of torch gives to the loop: a model that may be compiled, and a loss."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.errors import UsageError
from hvdtrain.train.config.plain_text import did_you_mean

__all__ = ["compiled", "require_scalar"]


def compiled(model: torch.nn.Module, backend: str) -> Any:
    """Return a model that is compiled when it is first called.

    Raises:
        UsageError: torch has no such backend.
    """
    if backend not in torch.compiler.list_backends(exclude_tags=None):
        known: list[str] = torch.compiler.list_backends()
        near = did_you_mean(backend, known)
        raise UsageError(
            f"--compile {backend}: torch has no such backend{near or ':'} it has {', '.join(known)}"
        )
    return torch.compile(model, backend=backend)


def require_scalar(loss: Any) -> None:
    """Check what the loss of a recipe returned.

    Raises:
        UsageError: it is not one number.
    """
    if isinstance(loss, torch.Tensor) and not loss.ndim:
        return
    shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
    raise UsageError(
        f"the loss of a recipe must return one number, the mean over the batch, as a torch.Tensor "
        f"without dimensions, got a {type(loss).__name__}{shape}"
    )
