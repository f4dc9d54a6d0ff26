"""The model and the loss of a torch recipe: compiled, checked, buffers averaged."""

from __future__ import annotations

import os
from typing import Any

import torch

import hvdtrain.torch as hvd
from hvdtrain.advice import did_you_mean
from hvdtrain.collective import collective
from hvdtrain.compiled.compiler import find_compiler
from hvdtrain.errors import UsageError

_AVERAGED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Where CXX is not set; torch looks for no other.
_COMPILERS_OF_INDUCTOR = ("g++",)


def compile_model(model: torch.nn.Module, backend: str) -> Any:
    """Return the model compiled by torch.compile when it is first called."""
    if backend not in torch.compiler.list_backends(exclude_tags=None):
        known: list[str] = torch.compiler.list_backends()
        near = did_you_mean(backend, known)
        raise UsageError(
            f"--compile {backend}: torch has no such backend{near or ':'} it has {', '.join(known)}"
        )
    if backend == "inductor" and any(p.device.type == "cpu" for p in model.parameters()):
        try:
            find_compiler(os.environ, _COMPILERS_OF_INDUCTOR)
        except UsageError as error:
            raise UsageError(f"--compile {backend}: {error}") from None
    return torch.compile(model, backend=backend)


def require_scalar(loss: Any) -> None:
    """Check that the loss of a recipe is one number."""
    if isinstance(loss, torch.Tensor) and not loss.ndim:
        return
    shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
    raise UsageError(
        f"the loss of a recipe must return one number, the mean over the batch, as a torch.Tensor "
        f"without dimensions, got a {type(loss).__name__}{shape}"
    )


@collective
def average_model_buffers(model: torch.nn.Module, ranks: int | None = None) -> None:
    """Make a model's buffers equal on all ranks.

    Floating-point buffers of 16 bits and more are averaged; others are copied from rank 0. Batch
    normalization keeps running means and variances of the samples that a rank has seen; they do
    not change what is learned, but they change the results of an evaluation.
    """
    ranks = hvd.size() if ranks is None else ranks
    buffers = list(model.buffers())
    floating = [buffer for buffer in buffers if buffer.dtype in _AVERAGED]
    if floating:
        if hvd.rank() >= ranks:
            for buffer in floating:
                buffer.zero_()
        hvd.grouped_allreduce_(floating, name="buffers", postscale_factor=1 / ranks, op=hvd.Sum)
    rest = [(str(n), b) for n, b in enumerate(buffers) if b.dtype not in _AVERAGED]
    if rest:
        hvd.broadcast_parameters(rest, root_rank=0)
