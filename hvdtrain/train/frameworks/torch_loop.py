"""One epoch of training and one of evaluation with torch, exact on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

import hvdtrain.torch as hvd
from hvdtrain.data.dataset import Dataset, Samples
from hvdtrain.data.sharding import rank_slice
from hvdtrain.train.course import Course
from hvdtrain.train.frameworks.torch_state import TorchState
from hvdtrain.train.recipe import TorchRecipe
from hvdtrain.train.results import Score, Sums

__all__ = ["TorchLoop"]

_EVALUATION_BATCH = 1024


class TorchLoop:
    """A model in training: its weights, its optimizer and its share of the data.

    Making one is local, up to the DistributedOptimizer's agreement on the model (collective).

    Args:
        recipe: model, loss and optimizer.
        course: the steps.
        data: all samples; each rank takes its part of them.
        device: where the model and the data live.
    """

    def __init__(
        self, recipe: TorchRecipe, course: Course, data: Dataset, device: torch.device
    ) -> None:
        self._course, self._device = course, device
        self._shards = course.options.virtual_shards
        options = course.options
        self._dtype = getattr(torch, options.dtype)
        self._train = self._tensors(data.train)
        self._test = self._tensors(data.test)
        self._loss = recipe.loss
        # Rank 0's weights are the ones that count: others start elsewhere, so that a broadcast
        # that went wrong shows in the digests.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed + course.topology.rank)
            self._model = recipe.build_model().to(device, self._dtype)
        self._optimizer = hvd.DistributedOptimizer(
            recipe.optimizer(options.optimizer, self._model.parameters(), options.base_lr),
            named_parameters=self._model.named_parameters(),
            op=hvd.Average if self._shards is None else hvd.Sum,
        )
        self.state = TorchState(self._model, self._optimizer)

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        rate: float = self._optimizer.param_groups[0]["lr"]
        return rate

    def broadcast(self) -> None:
        """Give every rank the weights and the optimizer state of rank 0 (collective)."""
        hvd.broadcast_parameters(self._model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self._optimizer, root_rank=0)

    def train_epoch(self, epoch: int, done: int, go_on: Callable[[], bool]) -> Sums:
        """Use every training sample that is left once; return sums while learning (collective).

        Args:
            epoch: counted from 0.
            done: how many of its samples were used before.
            go_on: called after each optimizer step; where it returns False, on all ranks at the
                same step, that was the last one.
        """
        self._model.train()
        sums = self._no_sums()
        for step, batch in self._course.batches(epoch, done):
            for group in self._optimizer.param_groups:
                group["lr"] = self._course.lr(step)
            sums += self._step(batch)
            if not go_on():
                break
        return _reduced(sums)

    def evaluate(self) -> Score:
        """Return the mean score over all test samples, each seen by one rank (collective)."""
        self._model.eval()
        inputs, labels = self._test
        part = self._course.mine(len(labels))
        sums = self._no_sums()
        with torch.no_grad():
            for start in range(part.start, part.stop, _EVALUATION_BATCH):
                chosen = slice(start, min(start + _EVALUATION_BATCH, part.stop))
                scores = self._model(inputs[chosen])
                sums += _sums(scores, labels[chosen], self._loss(scores, labels[chosen]))
        return _reduced(sums).score

    def _step(self, batch: npt.NDArray[np.int64]) -> torch.Tensor:
        """Take one optimizer step on a global batch; return the sums over this rank's part."""
        self._optimizer.zero_grad()
        if self._shards is None:
            sums = self._backward(batch[self._course.mine(len(batch))])
        else:
            sums = self._backward_by_shards(batch, self._shards)
        self._optimizer.step()
        return sums

    def _backward(self, mine: npt.NDArray[np.int64]) -> torch.Tensor:
        # The mean over the global batch is the mean of the ranks' means, weighted by samples.
        self._optimizer.sample_weight = len(mine)
        if not len(mine):
            return self._no_sums()
        scores, labels = self._forward(mine)
        loss = self._loss(scores, labels)
        loss.backward()
        return _sums(scores.detach(), labels, loss.detach())

    def _backward_by_shards(self, batch: npt.NDArray[np.int64], shards: int) -> torch.Tensor:
        sums = self._no_sums()

        def loss_of(shard: int) -> torch.Tensor:
            part = batch[rank_slice(len(batch), shard, shards)]
            scores, labels = self._forward(part)
            if not len(part):
                return scores.sum()
            loss = self._loss(scores, labels)
            sums.add_(_sums(scores.detach(), labels, loss.detach()))
            return loss * (len(part) / len(batch))

        hvd.backward_by_shards(self._model.parameters(), shards, loss_of)
        return sums

    def _forward(self, samples: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the model's scores and the labels of samples, by their numbers."""
        chosen = torch.from_numpy(samples).to(self._device)
        return self._model(self._train[0][chosen]), self._train[1][chosen]

    def _tensors(self, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.from_numpy(samples.inputs).to(self._device, self._dtype)
        return inputs, torch.from_numpy(samples.labels).to(self._device)

    def _no_sums(self) -> torch.Tensor:
        return torch.zeros(3, dtype=torch.float64, device=self._device)


def _sums(scores: torch.Tensor, labels: torch.Tensor, mean_loss: torch.Tensor) -> torch.Tensor:
    """Return [sum of losses, number correct, number of samples] of a batch, float64."""
    correct = (scores.argmax(dim=1) == labels).sum()
    count = torch.tensor(len(labels), device=scores.device)
    return torch.stack([mean_loss.double() * count, correct.double(), count.double()])


def _reduced(sums: torch.Tensor) -> Sums:
    return Sums.of(hvd.allreduce(sums, name="score", op=hvd.Sum).tolist())
