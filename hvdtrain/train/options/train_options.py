"""All options of a training run, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hvdtrain.train.optimizers.schedule import scaled_lr
from hvdtrain.train.options.data import Data
from hvdtrain.train.options.declare import declared, groups_of
from hvdtrain.train.options.devices import Devices
from hvdtrain.train.options.evaluation import Evaluation
from hvdtrain.train.options.optimisation import Optimisation
from hvdtrain.train.options.precision import Precision
from hvdtrain.train.options.saving import Saving
from hvdtrain.train.options.schedule import Schedule
from hvdtrain.train.options.support import require_framework_has
from hvdtrain.train.options.task import Task
from hvdtrain.train.options.tracking import Tracking
from hvdtrain.train.options.watching import Watching

__all__ = ["OPTIONS", "TrainOptions"]


# The last base is the first group: dataclasses collect fields in that order.
@dataclass(frozen=True, kw_only=True)
class TrainOptions(
    Devices,
    Tracking,
    Watching,
    Evaluation,
    Saving,
    Precision,
    Schedule,
    Optimisation,
    Data,
    Task,
):
    """Options of one training run; the same on every rank.

    Each base declares those of one topic.

    Raises:
        UsageError: a value makes no sense, or two do not go together; the message names the option.
    """

    def __post_init__(self) -> None:
        for one in OPTIONS:
            one.require(getattr(self, one.name))
        for group in groups_of(TrainOptions):
            group.check(self)
        values = {one.name: (getattr(self, one.name), one.default) for one in OPTIONS}
        require_framework_has(self.framework, values)

    def with_absolute_paths(self) -> TrainOptions:
        """Return the same options for a reader who stands elsewhere."""
        place, data_dir = self.recipe_place, self.data_dir
        recipe = self.recipe
        if place.path is not None:
            recipe = f"{place.path.absolute()}:{place.function}"
        return replace(self, recipe=recipe, data_dir=data_dir and data_dir.absolute())

    def scaled_lr(self, size: int) -> float:
        """Return the learning rate for `size` ranks, reached after the warm-up.

        With virtual shards it is that of one rank, whatever the size.
        """
        if self.virtual_shards is not None:
            return self.base_lr
        return scaled_lr(self.base_lr, size, self.lr_scaling)


# In the order of docs/options.md.
OPTIONS = declared(TrainOptions)
