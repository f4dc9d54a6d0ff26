"""Training with torch."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from hvdtrain.collective import collective
from hvdtrain.data.sampling import seed_generators
from hvdtrain.devices import Device, threads_set_by_user
from hvdtrain.errors import UsageError
from hvdtrain.topology import Topology
from hvdtrain.torch.shards import own_shards
from hvdtrain.torch.sync_batch_norm import SyncBatchNorm
from hvdtrain.train.config_file import counted
from hvdtrain.train.loop.protocol import Framework
from hvdtrain.train.loop.step_plan import StepPlan
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.torch.device import describe_device, limit_threads, select_device
from hvdtrain.train.torch.loop import TorchLoop
from hvdtrain.train.torch.served_loop import ServedLoop
from hvdtrain.train.torch.state import require_savable


class TorchFramework(Framework):
    """Trains with torch; gradients are reduced during the backward pass."""

    title = "torch"
    tensor_library = "pt"

    def __init__(self, options: TrainOptions) -> None:
        super().__init__(options)
        self._device = torch.device("cpu")

    def prepare(self, topology: Topology) -> None:
        shards = self._options.virtual_shards
        if shards is not None:
            own_shards(shards)
        self._device = select_device(topology, self._options)
        if shards is not None:  # a shard's gradient depends on the number of threads
            limit_threads(1)

    def build(self, make_recipe: Callable[[], Recipe], topology: Topology) -> Recipe:
        seed_generators(self._options.seed + topology.rank)
        recipe = make_recipe()
        _refuse_keras(self._options.recipe, recipe)
        if not isinstance(recipe.model, torch.nn.Module):
            raise UsageError(
                f"the model of {self._options.recipe} is a {type(recipe.model).__name__}, not a "
                "torch.nn.Module"
            )
        require_savable({"model": recipe.model.state_dict()})
        if recipe.most_threads is not None:
            limit_threads(recipe.most_threads)
        return recipe

    def device(self) -> Device:
        return describe_device(self._device)

    def threads(self) -> int | None:
        return torch.get_num_threads()

    def use_threads(self, threads: int) -> None:
        if not threads_set_by_user():
            torch.set_num_threads(threads)

    @collective
    def make_loop(self, recipe: Recipe, step_plan: StepPlan) -> TorchLoop:
        last, ranks = step_plan.samples % step_plan.global_batch_size, step_plan.topology.size
        together = any(isinstance(module, SyncBatchNorm) for module in recipe.model.modules())
        if together and 0 < last < ranks:
            raise UsageError(
                f"the last batch of an epoch has {counted(last, 'sample')} for {ranks} ranks, and "
                "SyncBatchNorm needs one on each: give another --global-batch-size"
            )
        server = self._options.parameter_server
        if server is not None:
            return ServedLoop(recipe, step_plan, self._device, server)
        return TorchLoop(recipe, step_plan, self._device)


def _refuse_keras(name: str, recipe: Recipe) -> None:
    """Refuse parts of Keras; on its backend torch a Keras model is a torch.nn.Module, too."""
    keras = sys.modules.get("keras")
    if keras is None:
        return
    parts = {"model": recipe.model, "loss": recipe.loss}
    parts |= {f"metric {metric!r}": part for metric, part in recipe.metrics.items()}
    for part, found in parts.items():
        if isinstance(found, (keras.Model, keras.losses.Loss, keras.metrics.Metric)):
            raise UsageError(
                f"the {part} of {name} is a {type(found).__name__} of Keras: give --framework keras"
            )
