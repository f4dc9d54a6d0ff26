"""Training with parameters that are in shards."""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from hvdtrain.collective import collective
from hvdtrain_compare.protocol.rank_file import Weights
from hvdtrain_compare.torch.trainer import Trainer


class ShardedTrainer(Trainer):
    """Gathers the shards of all processes where whole weights are asked for."""

    @collective
    def weights(self) -> Weights:
        """Return a copy of the weights by name."""
        found = {}
        for name, parameter in self.problem.model.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            found[name] = whole.detach().numpy().copy()
        return found
