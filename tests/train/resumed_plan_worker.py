"""Train with Adam, and again from a checkpoint: python resumed_plan_worker.py DIRECTORY.

First all steps, with a checkpoint on the way; then, in a world that has buckets of another size,
from that checkpoint with its bucket plan, and once more without. Reports the digest of the last
weights of each; and of what other frameworks' gradients are in a first world, in one with another
bucket size, and in one that was told the first size.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import report

import hvdtrain.torch as hvd
from hvdtrain.core import context
from hvdtrain.core.arguments import GradientSettings
from hvdtrain.core.arrays.fused import reduce_fused
from hvdtrain.core.gradients.bucket_size import BucketSize
from hvdtrain.core.membership.world import Context
from hvdtrain.core.objects import call_on_root
from hvdtrain.train.checkpoint.saver import Saver, newest_good
from hvdtrain.train.run import weights_digest
from hvdtrain.train.torch.state import TorchTrainingState

BEFORE, STEPS = 3, 6


class Backwards(torch.nn.Module):
    """Uses its layers in another order than it defines them, which the first step shows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.last = torch.nn.Linear(300, 2)
        self.first = torch.nn.Linear(40, 200)
        self.middle = torch.nn.Linear(200, 300)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.middle(self.first(inputs).tanh()).tanh())
        return result


class Training:
    def __init__(self) -> None:
        self.model = Backwards()
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(self.model.parameters(), lr=0.01), self.model.named_parameters()
        )
        self.state = TorchTrainingState(self.model, self.optimizer)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(100 * number + hvd.rank())
        inputs = torch.randn(8, 40, generator=generator)
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.state.settle()
        self.optimizer.step()

    def digest(self) -> str:
        return weights_digest(self.state.weights())


def train_all(directory: Path) -> str:
    """Save on the way, while the next step is taken."""
    training, saver = Training(), Saver(directory, keep=1)
    assert training.optimizer.bucket_plan() is None
    for number in range(STEPS):
        if number == BEFORE and hvd.rank() == 0:
            about = {"epoch": 0, "buckets": training.optimizer.bucket_plan()}
            saver.save(0, number, training.state, about)
        training.step(number)
    saver.finish()
    return training.digest()


def go_on(directory: Path, with_plan: bool) -> str:
    """Load on rank 0, as a run does, and take the steps that are left."""
    training = Training()

    def load() -> Any:
        content = newest_good(directory, "pt").content
        training.state.load(content)
        return content["buckets"] if with_plan else None

    training.optimizer.use_bucket_plan(call_on_root(load))
    if with_plan:
        spoilt = {**(training.optimizer.bucket_plan() or {}), "buckets": [[0, 1]]}
        with pytest.raises(ValueError, match="does not contain each of 6 parameters once"):
            training.optimizer.use_bucket_plan(spoilt)
    hvd.broadcast_parameters(training.model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(training.optimizer, root_rank=0)
    for number in range(BEFORE, STEPS):
        training.step(number)
    return training.digest()


def reduced() -> str:
    """Return a digest of gradients that are reduced as those of TensorFlow and Keras are."""
    generator = np.random.default_rng(hvd.rank())
    arrays = [generator.standard_normal(n, np.float32) for n in (90_000, 20_000, 7_001)]
    results = reduce_fused(arrays, arrays, "gradients", GradientSettings())
    return weights_digest({str(number): array for number, array in enumerate(results)})


@contextmanager
def world(bucket_bytes: int) -> Iterator[Context]:
    os.environ["HVDTRAIN_BUCKET_BYTES"] = str(bucket_bytes)
    hvd.init()
    yield context.current()
    hvd.shutdown()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    with world(1_000_000) as here:
        weights, gradients = [train_all(folder)], [reduced()]
        size = here.bucket_sizes[here.world].nbytes
    with world(50_000):
        weights += [go_on(folder, True), go_on(folder, False)]
        gradients.append(reduced())
    with world(50_000) as here:
        here.bucket_sizes[here.world] = BucketSize(size, "as in the checkpoint")
        gradients.append(reduced())
        report(cases=6, payload={"weights": weights, "gradients": gradients})
