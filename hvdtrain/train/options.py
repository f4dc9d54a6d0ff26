"""The options of a training run: what each is, which go together, and what follows from them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain import engines
from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.core.gradients.exchange import Exchange, Kind
from hvdtrain.devices import DeviceWish, parse_gpu_map
from hvdtrain.errors import UsageError
from hvdtrain.train.option import (
    at_least,
    between_0_and_1,
    declared,
    every,
    not_empty,
    not_negative,
    one_of,
    option,
    positive,
    requires,
)
from hvdtrain.train.parameter_server.protocol import ALLREDUCE, ParameterServer, parse_strategy
from hvdtrain.train.tracking.trackers import TRACKERS, tracker_names

RECIPES = ("digits", "mnist", "cifar10", "imagefolder", "mapfile", "text", "synthetic")
FRAMEWORKS = ("torch", "keras")
BACKENDS = ("tensorflow", "torch", "jax")
DTYPES = ("float32", "float64")
RUNS = Path("runs")
# Learning rates for one rank.
DEFAULT_LR = {"sgd": 0.02, "adam": 0.001, "adamw": 0.001, "lars": 1.0, "lamb": 0.002}

BATCH_SIZE = 16
AVERAGE = "average"


def _check_framework(label: str, value: str) -> None:
    if value == "tensorflow":
        raise UsageError(
            f"{label} tensorflow was removed: it trained the same Keras models; use --framework "
            "keras --backend tensorflow (in a file: framework: keras, backend: tensorflow)"
        )
    one_of(FRAMEWORKS)(label, value)


def _check_exchange(label: str, value: str) -> None:
    try:
        make_exchange(value)
    except ValueError as error:
        raise UsageError(f"{label} {str(error).removeprefix('exchange ')}") from None


def parse_milestones(text: str) -> tuple[float, ...]:
    """Return the epochs in a text such as "30,60,80"; none for an empty text."""
    try:
        milestones = tuple(float(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        milestones = (math.nan,)
    ascending = all(a < b for a, b in zip((0.0, *milestones), milestones, strict=False))
    if not ascending or not all(map(math.isfinite, milestones)):
        raise UsageError(
            f"--milestones must be ascending epochs with commas, such as 30,60,80, got {text!r}"
        )
    return milestones


_FILE = re.compile(r"(?P<path>.+\.py)(:(?P<function>[^:/]*))?", re.DOTALL)


class RecipeLocation(NamedTuple):
    """Where the function of a recipe is."""

    path: Path | None
    function: str


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of one training run; the same on every rank."""

    recipe: str = option(
        "digits",
        f"Model and data to train: {', '.join(RECIPES)}, or a function in your own file.",
        group="What is trained",
        metavar="NAME|FILE.py[:FUNCTION]",
    )
    set: Mapping[str, Any] = option(
        {},
        "Argument of the recipe's function; may be given several times.",
        metavar="NAME=VALUE",
    )
    data_dir: Path | None = option(None, "Directory of the recipe's data.", metavar="DIR")
    framework: str = option(
        "torch", "Framework that trains the model.", choices=FRAMEWORKS, check=_check_framework
    )
    backend: str | None = option(
        None,
        "Backend of Keras.",
        choices=BACKENDS,
        unset="$KERAS_BACKEND, or tensorflow",
    )

    epochs: int = option(
        15,
        "Passes over the training data in total, those before a resume included.",
        group="Data",
        check=at_least(1),
    )
    divide_epochs: bool = option(
        False, "Divide --epochs by the number of ranks, rounded up, as Horovod's examples do."
    )
    batch_size: int | None = option(
        None, "Samples per rank and backward pass.", unset=str(BATCH_SIZE), check=at_least(1)
    )
    global_batch_size: int | None = option(
        None, "Samples of all ranks per step, instead of --batch-size.", check=at_least(1)
    )
    accumulate: int = option(
        1, "Backward passes per step, whose gradients are accumulated.", check=at_least(1)
    )
    virtual_shards: int | None = option(
        None,
        "Parts of each batch, for the same bits on 1, 2, 4 ... ranks, see docs/numerics.md.",
        check=at_least(1),
    )
    elastic_batch: str = option(
        "keep",
        "After ranks are lost: keep the samples of all ranks per step and the learning rate, or "
        "rescale both to the remaining ranks.",
        metavar="[keep|rescale]",
        check=one_of(("keep", "rescale")),
    )
    elastic_snapshot: str | None = option(
        None,
        "How often ranks keep a snapshot in memory to go back to when ranks are killed, where "
        "options need one, see docs/elastic.md: '50 steps', '30 seconds'.",
        metavar="INTERVAL",
        unset="as often as it takes 1 % of the time",
        check=every,
    )
    workers: int = option(
        0, "Processes per rank that load samples; 0: the rank loads them itself.", check=at_least(0)
    )
    dry_run: int | None = option(
        None,
        "Train on so many batches and test on as many, in a folder that is removed, and print the "
        "time of a step and the memory of each rank.",
        metavar="N",
        check=at_least(1),
    )
    overfit: int | None = option(
        None,
        "Train on the first so many batches only, and test on the same samples: the loss must go "
        "to 0.",
        metavar="N",
        check=at_least(1),
    )
    find_lr: int | None = option(
        None,
        "Instead of training, print which --lr to take: the rate grows in so many steps, such as "
        "100, until the loss diverges.",
        metavar="N",
        check=at_least(10),
    )
    find_batch_size: int | None = option(
        None,
        "Instead of training, print which --batch-size to take: so many steps, such as 10, with "
        "each of growing sizes, from --batch-size on.",
        metavar="N",
        check=at_least(1),
    )
    seed: int = option(
        0,
        "Seed of the initial weights, the order of samples and all other randomness.",
        check=requires(lambda value: 0 <= value < 1 << 63, "be between 0 and 2^63 - 1"),
    )

    optimizer: str = option(
        "sgd",
        "Optimizer that updates the weights.",
        group="Optimization",
        choices=tuple(DEFAULT_LR),
    )
    lr: float | None = option(
        None,
        "Learning rate for one rank.",
        unset=", ".join(f"{name} {value:g}" for name, value in DEFAULT_LR.items()),
        check=positive,
    )
    momentum: float = option(0.9, "Momentum of sgd and lars.", check=between_0_and_1)
    weight_decay: float | None = option(
        None, "Weight decay.", unset="adamw 0.01, else 0", check=not_negative
    )
    clip_norm: float | None = option(
        None,
        "Maximum norm of the reduced gradient, to which larger ones are scaled.",
        check=positive,
    )
    ema: float | None = option(
        None,
        "Decay of a moving average of the weights, such as 0.999, which is evaluated and saved.",
        check=between_0_and_1,
    )
    shard_optimizer: bool | None = option(
        None,
        "Share the optimizer's work and state among the ranks of a node, see docs/sharded.md.",
        unset="where it changes no bit of the results",
    )

    exchange: str = option(
        AVERAGE,
        "How ranks combine gradients or weights, see docs/exchanges.md; 'hvdtrain exchanges' lists "
        "them.",
        group="Exchange",
        metavar="NAME[:KEY=VALUE,...]",
        check=_check_exchange,
    )
    strategy: str = option(
        ALLREDUCE,
        "allreduce, or a parameter server such as ps:servers=1,mode=async, see "
        "docs/exchanges/parameter-server.md.",
        metavar="NAME[:KEY=VALUE,...]",
        check=parse_strategy,
    )

    lr_scaling: str = option(
        "linear",
        "How the learning rate grows with the ranks.",
        group="Learning rate over time",
        choices=("linear", "sqrt", "none"),
    )
    warmup_epochs: float = option(
        5.0, "Epochs in which it rises from the rate for one rank.", check=not_negative
    )
    schedule: str = option(
        "constant",
        "How it decays after the warm-up.",
        choices=("constant", "step", "cosine", "polynomial"),
    )
    milestones: str = option(
        "", "For step: the epochs after which it decays, such as 30,60,80.", metavar="E,F,..."
    )
    decay: float = option(0.1, "For step: its factor at each milestone.", check=positive)
    power: float = option(1.0, "For polynomial: the exponent; 1: a straight line.", check=positive)
    final_lr: float = option(
        0.0,
        "For cosine and polynomial: the final rate, not scaled by the ranks.",
        check=not_negative,
    )

    dtype: str = option(
        "float32", "Data type of weights and arithmetic.", group="Precision", choices=DTYPES
    )
    amp: str = option(
        "none",
        "Mixed precision: the data type of matrix products.",
        choices=("none", "bf16", "fp16"),
    )
    compile: str | None = option(
        None,
        "Compile the model with this backend of torch.compile, such as inductor.",
        metavar="BACKEND",
        check=not_empty,
    )

    out: Path | None = option(
        None,
        "Directory for results.",
        group="Results and checkpoints",
        metavar="DIR",
        unset=f"a new one in {RUNS}/",
    )
    resume: str = option(
        "never",
        "Resume from the newest intact checkpoint in --out (auto), or from one at a path.",
        metavar="[never|auto|PATH]",
        check=not_empty,
    )
    checkpoint_every: str = option(
        "1 epoch",
        "How often to save: '5 steps', '10 minutes', '1 epoch'.",
        metavar="INTERVAL",
        check=every,
    )
    keep_checkpoints: int = option(
        3, "Number of newest checkpoints to keep; the best one is kept as well.", check=at_least(1)
    )

    evaluate_every: str = option(
        "1 epoch",
        "How often to evaluate on the test samples: '100 steps', '1 epoch'.",
        group="Evaluation",
        metavar="INTERVAL",
        check=every,
    )
    best: str = option(
        "loss",
        "Test metric that decides which checkpoint is the best.",
        metavar="METRIC",
        check=not_empty,
    )
    early_stop: int | None = option(
        None, "Stop after this many evaluations without a new best.", check=at_least(1)
    )

    log_every: int | None = option(
        None,
        "Steps between two lines of steps.jsonl.",
        group="Watching",
        unset="torch 50, else once an epoch",
        check=at_least(1),
    )
    watch_every: int | None = option(
        None,
        "Steps between two comparisons of all ranks' weights; 0: never.",
        unset="torch 100, else once an epoch",
        check=at_least(0),
    )
    non_finite: str = option(
        "stop", "What to do if a loss or gradient is not finite.", choices=("stop", "skip")
    )
    live: bool = option(
        False, "Serve the report to browsers on rank 0's machine while it trains (needs Jinja2)."
    )
    verbose: bool = option(
        False,
        "Print also what is measured at the start, as for buckets, and the traceback of an error "
        "in a recipe or callback.",
    )
    quiet: bool = option(False, "Print nothing but errors.")

    track: str = option(
        "",
        f"Trackers to report to, beside metrics.jsonl: any of {', '.join(TRACKERS)}.",
        group="Tracking",
        metavar="NAME,...",
    )
    tracking_uri: str | None = option(
        None,
        "MLflow's tracking server, or sqlite:///FILE.",
        metavar="URI",
        unset="as MLflow decides",
        check=not_empty,
    )
    experiment: str | None = option(
        None,
        "Experiment of MLflow, or project of W&B.",
        metavar="NAME",
        unset="hvdtrain",
        check=not_empty,
    )
    run_name: str | None = option(
        None,
        "Name of this run in MLflow and W&B.",
        metavar="NAME",
        unset="that of --out",
        check=not_empty,
    )

    engine: str = option(
        "auto",
        "Library that communicates, see docs/engines.md; auto: nccl if each rank has a GPU, "
        "otherwise mpi, or gloo under torchrun.",
        group="Devices",
        choices=("auto", *engines.ENGINES),
    )
    device: str = option(
        "auto",
        "cuda: one GPU for each local rank; auto: GPUs if there are any.",
        choices=("auto", "cpu", "cuda"),
    )
    gpu_map: str | None = option(
        None,
        "GPU of each local rank, such as 3,2,1,0.",
        metavar="I,J,...",
        unset="the local rank",
    )
    share_gpus: bool = option(False, "Let several ranks use the same GPU.")

    def __post_init__(self) -> None:
        for one in OPTIONS:
            one.require(getattr(self, one.name))
        _require_consistent(self)

    @property
    def recipe_location(self) -> RecipeLocation:
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
        """Return the options of a try: one epoch, and nothing of another run."""
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

        For N ranks that compute gradients, linear is base * N, for SGD while N steps of base are
        close to one step of N * base; sqrt is base * sqrt(N), which keeps the covariance of the
        update, usual for Adam.

        With virtual shards it is that of one rank, whatever the size; also with an asynchronous
        parameter server, where each update is a step on the samples of one rank.
        """
        server = self.parameter_server
        if self.virtual_shards is not None or (server is not None and server.is_async):
            return self.base_lr
        return self.base_lr * self.scaling(self.worker_count(size))

    def scaling(self, times: float) -> float:
        """Return the factor of the learning rate for so many times the samples per step."""
        factors = {"linear": float(times), "sqrt": math.sqrt(times), "none": 1.0}
        return factors[self.lr_scaling]

    @property
    def used_weight_decay(self) -> float:
        """The weight decay; by default 0.01 for adamw, else 0."""
        if self.weight_decay is not None:
            return self.weight_decay
        return 0.01 if self.optimizer == "adamw" else 0.0

    def epochs_with(self, size: int) -> int:
        """Return the number of epochs that `size` ranks train."""
        return -(-self.epochs // self.worker_count(size)) if self.divide_epochs else self.epochs

    def samples_per_step(self, size: int) -> int:
        """Return the global batch size for `size` ranks, all backward passes of a step included."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        return (self.batch_size or BATCH_SIZE) * self.accumulate * self.worker_count(size)


# In the order of docs/options.md.
OPTIONS = declared(TrainOptions)

# What options are called elsewhere, by their key here.
_NAMES_ELSEWHERE = {
    "lr": ("learning-rate", "base-lr"),
    "find-lr": ("find-learning-rate", "lr-find", "auto-lr-find"),
    "find-batch-size": ("auto-scale-batch-size", "scale-batch-size"),
    "epochs": ("epoch", "num-epochs", "max-epochs"),
    "batch-size": ("batch", "bs", "batchsize"),
    "out": ("output", "output-dir", "checkpoint-dir"),
    "workers": ("num-workers",),
}


def key_of_name_elsewhere(name: str) -> str | None:
    """Return the key of the option that other trainers call so."""
    name = name.replace("_", "-")
    known = (key for key, names in _NAMES_ELSEWHERE.items() if name in (key, *names))
    return next(known, None)


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
    ("find_lr", (), "its workers do not step together"),
    ("find_batch_size", (), "its workers do not step together"),
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
    for names in (
        ("batch_size", "global_batch_size"),
        ("find_batch_size", "global_batch_size"),
        ("find_batch_size", "find_lr", "dry_run"),
    ):
        given = [f"--{n.replace('_', '-')}" for n in names if getattr(options, n) is not None]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} exclude each other: give one")
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
