"""Training with Accelerate."""

from __future__ import annotations

from typing import Any

import accelerate
import numpy as np
import torch
from torch.utils.data import DataLoader

from hvdtrain.data.sampling import Indices
from hvdtrain.train.torch.evaluation import call_model
from hvdtrain_bench.compare.division import EVALUATED_TOGETHER
from hvdtrain_bench.compare.torch_training import TorchProblem, TorchTrainer


class AcceleratedDivision:
    """Divides the numbers of samples with data loaders that Accelerate has prepared."""

    def __init__(self, accelerator: Any, batch: int) -> None:
        self._accelerator, self._batch = accelerator, batch

    def train_shares(self, order: Indices) -> list[Indices]:
        each = self._batch // self._accelerator.num_processes
        return [part.numpy() for part in self._prepared(order, each)]

    def test_share(self, samples: int) -> Indices:
        """Return the test samples that this process evaluates and that count; see Division."""
        kept = [np.zeros(0, np.int64)]
        for part in self._prepared(np.arange(samples), EVALUATED_TOGETHER):
            # Those of all processes, in their order, without the padding at the end.
            counted = self._accelerator.gather_for_metrics(part).numpy()
            start = len(part) * self._accelerator.process_index
            kept.append(counted[start : start + len(part)])
        return np.concatenate(kept)

    def _prepared(self, numbers: Indices, each: int) -> Any:
        loader: Any = DataLoader(torch.from_numpy(numbers), each)  # type: ignore[arg-type]
        return self._accelerator.prepare(loader)


class AcceleratedTrainer(TorchTrainer):
    """Lets Accelerate prepare model, optimizer and data."""

    def __init__(self, problem: TorchProblem) -> None:
        self._accelerator: Any = accelerate.Accelerator(cpu=True)
        own = problem.optimizer(problem.model)
        model, optimizer = self._accelerator.prepare(problem.model, own)
        super().__init__(
            problem,
            model=model,
            optimizer=optimizer,
            division=AcceleratedDivision(self._accelerator, problem.batch),
            library=f"Accelerate {accelerate.__version__}, torch {torch.__version__}, gloo",
        )

    def outputs(self, inputs: Any) -> Any:
        # In evaluation processes may have different numbers of batches, which DDP does not allow.
        return call_model(self.model if self.model.training else self.problem.model, inputs)

    def backward(self, loss: torch.Tensor) -> None:
        self._accelerator.backward(loss)
