"""Training with an optimizer of hvdtrain, in which a rank may have fewer samples than another."""

from __future__ import annotations

from typing import Any

from hvdtrain.collective import collective
from hvdtrain_compare.torch.trainer import Trainer


class ExactTrainer(Trainer):
    """Weights gradients by the number of samples, of which a rank may have none."""

    @collective
    def step(self, inputs: Any, targets: Any, samples: int) -> None:
        """Train one step; see Trainer.step."""
        self.optimizer.zero_grad()
        exchange = self.optimizer.exchange
        if exchange is None or exchange.takes_samples:
            self.optimizer.sample_weight = samples
        if samples:
            self.backward(self.loss(inputs, targets))
        self.optimizer.step()

    @collective
    def settle(self) -> None:
        """Make the weights equal, if ranks have exchanged weights now and then."""
        self.optimizer.flush()
