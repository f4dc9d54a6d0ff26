"""Ranks that train, of which some are killed in the middle of a step."""

import os
import signal
from collections.abc import Callable

import pytest
import torch
from ranks import report

import hvdtrain.torch as hvd
from hvdtrain.core.context import recover
from hvdtrain.errors import RanksLostError, UnsupportedError

RATE, MOMENTUM = 0.1, 0.9
SHAPES = ([300, 40], [40], [70], [1000, 20])  # of more than one bucket


class Training:
    def __init__(self) -> None:
        hvd.init()
        self.own, self.left = hvd.rank(), list(range(hvd.size()))
        self.weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        sgd = torch.optim.SGD(self.weights, lr=RATE, momentum=MOMENTUM)
        self.optimizer = hvd.DistributedOptimizer(sgd)
        self._expected, self._velocity, self._steps = 0.0, 0.0, 0

    @property
    def steps(self) -> int:
        return self.optimizer._exchanged.steps

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = sum(((weight - self.own) ** 2).sum() / 2 for weight in self.weights)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        self.optimizer.step()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.check()

    def check(self) -> None:
        """Check that weights are those after the steps so far, with the bits of all ranks."""
        while self._steps < self.steps:
            gradient = self._expected - sum(self.left) / len(self.left)
            self._velocity = MOMENTUM * self._velocity + gradient
            self._expected -= RATE * self._velocity
            self._steps += 1
        own = torch.cat([weight.detach().flatten() for weight in self.weights])
        torch.testing.assert_close(own, torch.full_like(own, self._expected))
        assert (hvd.allgather(own[None], name="weights") == own).all()

    def go_on_without(self, victim: int, prepare: Callable[[], object] = bool) -> None:
        """Train until a rank is killed, and go on without it; the step before is on all ranks."""
        if self.own == victim:
            prepare()
        try:
            while True:
                self.step()
        except RanksLostError:
            assert recover().size == len(self.left) - 1
        steps = hvd.allgather_object(self.steps)
        assert steps == [self.steps] * len(steps)
        self.check()
        self.left.remove(victim)
        self.train(4)

    def die_in_backward(self) -> None:
        """Have this rank be killed when one gradient is there and another one is not."""
        self.weights[1].register_hook(be_killed)

    def die_in_step(self) -> None:
        """Have this rank be killed when its gradients are reduced."""
        self.optimizer.register_step_pre_hook(be_killed)

    def take_one_step_alone(self) -> None:
        """Be ahead of the others, as if they had been broken off in this step."""
        for weight in self.weights:
            weight.grad = weight.detach() - sum(self.left) / len(self.left)
        self.optimizer._optimizer.step()
        self.optimizer._exchanged.steps += 1


def be_killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    training = Training()
    training.train(4)
    with pytest.raises(UnsupportedError, match="sharded=True: with mpirun --with-ft ulfm"):
        hvd.DistributedOptimizer(torch.optim.SGD(training.weights), sharded=True)
    training.go_on_without(3, training.die_in_backward)
    training.go_on_without(0, training.die_in_step)
    if training.own == 2:
        training.take_one_step_alone()
    training.go_on_without(4, be_killed)
    hvd.shutdown()
    hvd.init()  # with those that are left
    training.train(4)
    report(5, training.left)


if __name__ == "__main__":
    main()
