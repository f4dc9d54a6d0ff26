"""Sums of losses and metrics while torch trains or evaluates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import hvdtrain.torch as hvd
from hvdtrain.collective import collective
from hvdtrain.core.objects import allgather_object
from hvdtrain.train.metrics.totals import Totals


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

    def add(self, outputs: Any, targets: Any, mean_loss: torch.Tensor, samples: int) -> None:
        """Add a batch.

        Args:
            outputs: outputs of the model, [samples, ...].
            targets: targets, [samples, ...].
        """
        self._samples += samples
        self._loss.add_(mean_loss.detach(), alpha=samples)
        for name, metric in self._metrics.items():
            counts = metric.counts(outputs, targets)
            known = self._counts.get(name)
            self._counts[name] = counts if known is None else known + counts

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
