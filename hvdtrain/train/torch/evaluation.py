"""Forward passes and evaluation with torch: the same bits on any number of ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

import hvdtrain.torch as hvd
from hvdtrain.collective import collective
from hvdtrain.compiled import find_compiler
from hvdtrain.core.objects import allgather_object
from hvdtrain.errors import UsageError, did_you_mean
from hvdtrain.topology import Topology
from hvdtrain.train.loop.protocol import Array
from hvdtrain.train.loop.step_plan import Microbatch
from hvdtrain.train.metrics import Totals
from hvdtrain.train.torch.sources import Step


class TorchMetricSums:
    """Adds up the samples, losses and metric counts of this rank."""

    def __init__(self, metrics: Mapping[str, Any], device: torch.device) -> None:
        self._metrics, self._device = metrics, device
        self._shapes: dict[str, list[int]] | None = None
        self._reset()

    def _reset(self) -> None:
        self._samples = 0
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)
        self._counts: dict[str, torch.Tensor] = {}
        self._seen = 0, 0.0

    def add(self, outputs: Any, targets: Any, mean_loss: torch.Tensor, samples: int) -> None:
        self._samples += samples
        self._loss.add_(mean_loss.detach(), alpha=samples)
        for name, metric in self._metrics.items():
            counts = metric.counts(outputs, targets)
            known = self._counts.get(name)
            self._counts[name] = counts if known is None else known + counts

    def mean_since(self) -> float:
        """Return the mean loss of this rank's samples since the last call; NaN without any."""
        (samples, loss), self._seen = self._seen, (self._samples, float(self._loss))
        count = self._samples - samples
        return (self._seen[1] - loss) / count if count else math.nan

    @collective
    def reduce(self) -> Totals:
        """Return the sums over all ranks, and start new ones."""
        shapes = self._agreed_shapes()
        parts = [torch.tensor([float(self._samples)], dtype=torch.float64), self._loss.cpu()[None]]
        for name, shape in shapes.items():
            counts = self._counts.get(name)
            empty = torch.zeros(shape, dtype=torch.float64)
            parts.append((empty if counts is None else counts.double().cpu()).reshape(-1))
        sums = hvd.allreduce(torch.cat(parts), name="score", op=hvd.Sum).numpy()
        self._reset()
        counts_of, start = {}, 2
        for name, shape in shapes.items():
            length = int(torch.Size(shape).numel())
            counts_of[name] = sums[start : start + length].reshape(shape)
            start += length
        return Totals(int(sums[0]), float(sums[1]), counts_of)

    @collective
    def _agreed_shapes(self) -> dict[str, list[int]]:
        """Return the shapes of counts, which a rank without samples does not know."""
        if self._shapes is None:
            own = {name: list(counts.shape) for name, counts in self._counts.items()}
            known = allgather_object(own, "shapes of metrics")
            self._shapes = max(known, key=len)
        return self._shapes


# Samples go through the model in chunks that do not depend on the number of ranks, so that their
# outputs are bitwise the same on any number.
_CHUNK = 128


def call_model(model: Any, inputs: Any) -> Any:
    """Call a model with one tensor, a tuple of arguments, or a mapping of keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def chunk_count(samples: int) -> int:
    return -(-samples // _CHUNK)


def own_chunks(samples: int, topology: Topology) -> list[Step]:
    """Return the chunks of this rank; each chunk is on one rank."""
    own = range(topology.rank, chunk_count(samples), topology.size)
    rows = [np.arange(n * _CHUNK, min((n + 1) * _CHUNK, samples)) for n in own]
    return [Step(n, part, [Microbatch(n, part)]) for n, part in zip(own, rows, strict=True)]


def as_array(tensor: torch.Tensor) -> Array:
    """Return a tensor as a numpy array; half types become float32."""
    kept = tensor.detach().cpu()
    wide = kept.float() if kept.dtype in (torch.bfloat16, torch.float16) else kept
    array: Array = wide.numpy()
    return array


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


_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Mixed precision of operations; weights, gradients and optimizer state keep their types."""

    def __init__(self, amp: str, device: torch.device) -> None:
        self._device, self._type = device.type, _TYPES.get(amp)
        self.scaler = torch.amp.GradScaler(device.type) if amp == "fp16" else None
        self.losses: list[torch.Tensor] = []

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context for a forward pass and its loss, but not for backward."""
        if self._type is None:
            return nullcontext()
        return torch.autocast(self._device, dtype=self._type)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call backward() on."""
        if self.scaler is None:
            return loss
        self.losses.append(loss.detach())
        scaled: torch.Tensor = self.scaler.scale(loss)
        return scaled
