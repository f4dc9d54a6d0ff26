"""Which options of a training run go together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from hvdtrain.core.gradients.exchange import Kind
from hvdtrain.devices import parse_gpu_map
from hvdtrain.errors import UsageError
from hvdtrain.train.optimizers.schedule import parse_milestones
from hvdtrain.train.options.declare import Option
from hvdtrain.train.parameter_server.settings import ALLREDUCE
from hvdtrain.train.tracking.trackers import tracker_names

if TYPE_CHECKING:
    from hvdtrain.train.options.train_options import TrainOptions

RECIPES = ("digits", "mnist", "cifar10", "imagefolder", "mapfile", "text", "synthetic")
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


def require_consistent(options: TrainOptions, declared: Iterable[Option]) -> None:
    """Check that options, each valid by itself, go together."""
    known = {one.name: one for one in declared}

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
    if options.shard_optimizer and options.optimizer in ("lars", "lamb"):
        raise UsageError(
            f"--shard-optimizer does not go with --optimizer {options.optimizer}, which needs the "
            "norms of whole layers"
        )
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
