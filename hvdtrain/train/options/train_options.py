"""The options of a training run, which go together, and what follows from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.core.gradients.exchange import Exchange, Kind
from hvdtrain.devices import DeviceWish, parse_gpu_map
from hvdtrain.errors import UsageError
from hvdtrain.train.optimizers.schedule import parse_milestones, scaled_lr
from hvdtrain.train.options.table import (
    AVERAGE,
    BATCH_SIZE,
    DEFAULT_LR,
    OPTIONS,
    RECIPES,
    DeclaredOptions,
)
from hvdtrain.train.parameter_server.protocol import ALLREDUCE, ParameterServer, parse_strategy
from hvdtrain.train.tracking.trackers import tracker_names

_FILE = re.compile(r"(?P<path>.+\.py)(:(?P<function>[^:/]*))?", re.DOTALL)


class RecipeLocation(NamedTuple):
    """Where the function of a recipe is."""

    path: Path | None
    function: str


@dataclass(frozen=True, kw_only=True)
class TrainOptions(DeclaredOptions):
    """Options of one training run; the same on every rank."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_consistent(self)

    @property
    def recipe_location(self) -> RecipeLocation:
        """Where the function of the recipe is."""
        found = _FILE.fullmatch(self.recipe)
        if found is None:
            return RecipeLocation(None, "recipe")
        named = found["function"]
        return RecipeLocation(Path(found["path"]), "recipe" if named is None else named)

    @property
    def recipe_title(self) -> str:
        """The name of the recipe for people and for files: no path, no suffix."""
        path = self.recipe_location.path
        return self.recipe if path is None else path.stem

    def without_traces(self) -> TrainOptions:
        """Return the options of a --dry-run: one epoch, and nothing of another run."""
        return replace(self, epochs=1, resume="never", out=None)

    def with_absolute_paths(self) -> TrainOptions:
        """Return the same options for a reader in another working directory."""
        location, data_dir = self.recipe_location, self.data_dir
        recipe = self.recipe
        if location.path is not None:
            recipe = f"{location.path.absolute()}:{location.function}"
        return replace(self, recipe=recipe, data_dir=data_dir and data_dir.absolute())

    @property
    def device_wish(self) -> DeviceWish:
        """The device that a rank is to compute on."""
        return DeviceWish(self.device, parse_gpu_map(self.gpu_map), self.share_gpus)

    def make_exchange(self) -> Exchange | None:
        """Return a new exchange; None for the plain average of gradients."""
        if self.exchange == AVERAGE:
            return None
        exchange = make_exchange(self.exchange)
        if self.quiet:
            exchange.silence()
        return exchange

    @property
    def parameter_server(self) -> ParameterServer | None:
        """The settings of the parameter server; None: ranks all-reduce."""
        return parse_strategy("--strategy", self.strategy)

    def worker_count(self, size: int) -> int:
        """Return how many of `size` ranks compute gradients, at least 1."""
        server = self.parameter_server
        return size if server is None else max(1, size - server.servers)

    @property
    def base_lr(self) -> float:
        """The learning rate for one rank."""
        return DEFAULT_LR[self.optimizer] if self.lr is None else self.lr

    def scaled_lr(self, size: int) -> float:
        """Return the learning rate for `size` ranks, reached after the warm-up.

        With virtual shards it is that of one rank, whatever the size; also with an asynchronous
        parameter server, where each update is a step on the samples of one rank.
        """
        server = self.parameter_server
        if self.virtual_shards is not None or (server is not None and server.is_async):
            return self.base_lr
        return scaled_lr(self.base_lr, self.worker_count(size), self.lr_scaling)

    def epochs_with(self, size: int) -> int:
        """Return the number of epochs that `size` ranks train."""
        return -(-self.epochs // self.worker_count(size)) if self.divide_epochs else self.epochs

    def samples_per_step(self, size: int) -> int:
        """Return the global batch size for `size` ranks, all backward passes of a step included."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        return (self.batch_size or BATCH_SIZE) * self.accumulate * self.worker_count(size)


_WITH_KERAS = ("digits", "mnist")

# Options that apply to some values of another option only.
_OF_OPTIMIZER = {"momentum": ("sgd", "lars")}
_OF_SCHEDULE = {
    "milestones": ("step",),
    "decay": ("step",),
    "power": ("polynomial",),
    "final_lr": ("cosine", "polynomial"),
}
_OF_TRACKERS = {
    "tracking_uri": ("mlflow",),
    "experiment": ("mlflow", "wandb"),
    "run_name": ("mlflow", "wandb"),
}

# Options that do not go with another: name, values (none: all but the default), and the reason.
_Refusals = tuple[tuple[str, tuple[str | bool, ...], str], ...]
_NO_EXCHANGE: _Refusals = (
    ("virtual_shards", (), "its sums over shards have an order of their own: leave one out"),
    ("shard_optimizer", (True,), "only averages can be shared: leave one out"),
)
_NO_WEIGHTS: _Refusals = (
    ("amp", ("fp16",), "ranks would have to agree on the loss scale in each step: take --amp bf16"),
    ("ema", (), "ranks have different weights between two exchanges: leave one out"),
)
_NO_SERVER: _Refusals = (
    ("exchange", (), "workers push whole gradients"),
    ("optimizer", ("lars", "lamb"), "servers hold parts of layers, and cannot compute their norms"),
    ("clip_norm", (), "no rank has the whole reduced gradient"),
    ("ema", (), "servers do not average weights"),
    ("amp", ("fp16",), "servers do not agree on a loss scale"),
    ("virtual_shards", (), "gradients are added in the order of arrival"),
    ("shard_optimizer", (True,), "servers share the work already"),
    ("non_finite", ("skip",), "servers do not agree on skipping a step"),
    ("engine", ("local", "gloo", "nccl", "horovod"), "only mpi has messages between two ranks"),
)
_TORCH_ONLY: _Refusals = (
    ("optimizer", ("lars",), ""),
    ("amp", ("fp16",), ""),
    ("accumulate", (), ""),
    ("ema", (), ""),
    ("compile", (), "Keras compiles the step by itself"),
    ("workers", (), ""),
    ("non_finite", ("skip",), ""),
    ("virtual_shards", (), ""),
    ("engine", ("nccl",), "gradients of keras are reduced in host memory"),
)


def _require_consistent(options: TrainOptions) -> None:
    """Check that options, each valid by itself, go together."""
    known = {one.name: one for one in OPTIONS}

    def differs(name: str) -> bool:
        return bool(getattr(options, name) != known[name].default)

    def refuse(table: _Refusals, text: Callable[[str], str]) -> None:
        for name, refused, reason in table:
            value = getattr(options, name)
            if value in refused or (not refused and differs(name)):
                raise UsageError(f"{known[name].given(value)} {text(reason)}")

    def require_one_of(other: str, table: Mapping[str, tuple[str, ...]]) -> None:
        chosen = getattr(options, other)
        for name, applies in table.items():
            if differs(name) and chosen not in applies:
                raise UsageError(
                    f"{known[name].label} goes with --{other} {' or '.join(applies)} only, got "
                    f"--{other} {chosen}"
                )

    _check_task(options)
    _check_data(options)
    require_one_of("optimizer", _OF_OPTIMIZER)
    require_one_of("schedule", _OF_SCHEDULE)
    if options.schedule == "step" and not parse_milestones(options.milestones):
        raise UsageError("--schedule step needs --milestones, the epochs, such as 30,60,80")
    if options.amp != "none" and options.dtype != "float32":
        raise UsageError(f"--amp {options.amp} goes with --dtype float32 only, got {options.dtype}")
    if options.resume == "auto" and options.out is None:
        raise UsageError("--resume auto needs --out DIR, the directory to resume")
    named = tracker_names(options.track)
    for name, trackers in _OF_TRACKERS.items():
        if differs(name) and not set(trackers) & set(named):
            raise UsageError(
                f"{known[name].label} needs --track {' or '.join(trackers)}, got "
                f"--track {options.track!r}"
            )
    parse_gpu_map(options.gpu_map)
    if options.framework != "torch":
        only = f"goes with --framework torch only, got --framework {options.framework}"
        refuse(_TORCH_ONLY, lambda reason: f"{only}: {reason}" if reason else only)
    if options.strategy != ALLREDUCE:
        refuse(
            _NO_SERVER,
            lambda reason: f"does not go with --strategy {options.strategy}: {reason}",
        )
    exchange = options.make_exchange()
    if exchange is not None:
        refuse(
            _NO_EXCHANGE + _NO_WEIGHTS * (exchange.kind is Kind.WEIGHTS),
            lambda reason: f"does not go with --exchange {options.exchange}: {reason}",
        )
    if options.shard_optimizer and options.virtual_shards is not None:
        raise UsageError(
            "--shard-optimizer and --virtual-shards exclude each other: one rank alone, which "
            "shares nothing, would not get the same bits"
        )


def _check_task(options: TrainOptions) -> None:
    """Check the recipe and its framework."""
    recipe, location = options.recipe, options.recipe_location
    if options.backend is not None and options.framework != "keras":
        raise UsageError(f"--backend {options.backend} goes with --framework keras only")
    if location.path is not None:
        if not location.function.isidentifier():
            raise UsageError(
                f"recipe {recipe!r}: {location.function!r} is no name of a function, as in "
                f"{location.path}:recipe"
            )
    elif recipe not in RECIPES:
        raise UsageError(
            f"unknown recipe {recipe!r}: choose from {', '.join(RECIPES)}, or name a file, as "
            "my_recipe.py"
        )
    elif options.framework != "torch" and recipe not in _WITH_KERAS:
        raise UsageError(
            f"recipe {recipe} goes with --framework torch only: with {options.framework} choose "
            f"from {', '.join(_WITH_KERAS)}, or name a file"
        )


def _check_data(options: TrainOptions) -> None:
    """Check the numbers of samples."""
    if options.batch_size is not None and options.global_batch_size is not None:
        raise UsageError("--batch-size and --global-batch-size exclude each other: give one")
    if options.virtual_shards is None:
        return
    if options.divide_epochs:
        raise UsageError(
            "--virtual-shards and --divide-epochs exclude each other: with fewer epochs more ranks "
            "cannot give the same weights"
        )
    if options.global_batch_size is None:
        raise UsageError(
            "--virtual-shards needs --global-batch-size: a batch that grows with the ranks cannot "
            "give the same weights on any number of them"
        )
    if options.accumulate > 1:
        raise UsageError(
            f"--virtual-shards and --accumulate {options.accumulate} exclude each other: each "
            "virtual shard is a backward pass already"
        )
