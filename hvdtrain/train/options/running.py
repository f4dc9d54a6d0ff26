"""Options of a run: recipe, data, devices, saving, tracking and monitoring."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.devices import DeviceWish, parse_gpu_map
from hvdtrain.engines import registry
from hvdtrain.errors import UsageError
from hvdtrain.train.options.declare import OptionGroup, at_least, every, not_empty, one_of, option
from hvdtrain.train.tracking.trackers import TRACKERS, tracker_names

FRAMEWORKS = ("torch", "keras")
BACKENDS = ("tensorflow", "torch", "jax")

RECIPES = ("digits", "mnist", "cifar10", "imagefolder", "mapfile", "text", "synthetic")
_WITH_KERAS = ("digits", "mnist")
_FILE = re.compile(r"(?P<path>.+\.py)(:(?P<function>[^:/]*))?", re.DOTALL)
_DEFAULT_FUNCTION = "recipe"


def _check_framework(label: str, value: str) -> None:
    if value == "tensorflow":
        raise UsageError(
            f"{label} tensorflow was removed: it trained the same Keras models; use --framework "
            "keras --backend tensorflow (in a file: framework: keras, backend: tensorflow)"
        )
    one_of(FRAMEWORKS)(label, value)


@dataclass(frozen=True)
class RecipeLocation:
    """Where the function of a recipe is."""

    path: Path | None
    function: str = _DEFAULT_FUNCTION


@dataclass(frozen=True, kw_only=True)
class TaskOptions(OptionGroup):
    """Options for the recipe and the framework."""

    title = "What is trained"

    recipe: str = option(
        "digits",
        f"Model and data to train: {', '.join(RECIPES)}, or a function in your own file.",
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

    def check(self) -> None:
        if self.backend is not None and self.framework != "keras":
            raise UsageError(f"--backend {self.backend} goes with --framework keras only")
        location = self.recipe_location
        if location.path is None:
            _require_built_in(self.recipe, self.framework)
        elif not location.function.isidentifier():
            raise UsageError(
                f"recipe {self.recipe!r}: {location.function!r} is no name of a function, as in "
                f"{location.path}:{_DEFAULT_FUNCTION}"
            )

    @property
    def recipe_location(self) -> RecipeLocation:
        """Where the function of the recipe is."""
        found = _FILE.fullmatch(self.recipe)
        if found is None:
            return RecipeLocation(None)
        named = found["function"]
        return RecipeLocation(Path(found["path"]), _DEFAULT_FUNCTION if named is None else named)

    @property
    def recipe_title(self) -> str:
        """The name of the recipe for people and for files: no path, no suffix."""
        path = self.recipe_location.path
        return self.recipe if path is None else path.stem


def _require_built_in(name: str, framework: str) -> None:
    if name not in RECIPES:
        raise UsageError(
            f"unknown recipe {name!r}: choose from {', '.join(RECIPES)}, or name a file, as "
            "my_recipe.py"
        )
    if framework != "torch" and name not in _WITH_KERAS:
        raise UsageError(
            f"recipe {name} goes with --framework torch only: with {framework} choose from "
            f"{', '.join(_WITH_KERAS)}, or name a file"
        )


DEFAULT_BATCH_SIZE = 16
_SEEDS = 1 << 63


def _check_seed(label: str, value: int) -> None:
    if not 0 <= value < _SEEDS:
        raise UsageError(f"{label} must be between 0 and 2^63 - 1, got {value}")


@dataclass(frozen=True, kw_only=True)
class DataOptions(OptionGroup):
    """Options for the amount of data per step and per run."""

    title = "Data"

    epochs: int = option(
        15,
        "Passes over the training data in total, those before a resume included.",
        check=at_least(1),
    )
    batch_size: int | None = option(
        None,
        "Samples per rank and backward pass.",
        unset=str(DEFAULT_BATCH_SIZE),
        check=at_least(1),
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
    seed: int = option(
        0,
        "Seed of the initial weights, the order of samples and all other randomness.",
        check=_check_seed,
    )

    def check(self) -> None:
        if self.batch_size is not None and self.global_batch_size is not None:
            raise UsageError("--batch-size and --global-batch-size exclude each other: give one")
        if self.virtual_shards is None:
            return
        if self.global_batch_size is None:
            raise UsageError(
                "--virtual-shards needs --global-batch-size: a batch that grows with the ranks "
                "cannot give the same weights on any number of them"
            )
        if self.accumulate > 1:
            raise UsageError(
                f"--virtual-shards and --accumulate {self.accumulate} exclude each other: each "
                "virtual shard is a backward pass already"
            )

    def samples_per_step(self, size: int) -> int:
        """Return the global batch size for `size` ranks, all backward passes of a step included."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        return (self.batch_size or DEFAULT_BATCH_SIZE) * self.accumulate * size


ENGINES = ("auto", *registry.ENGINES)
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(OptionGroup):
    """Options for devices and the engine."""

    title = "Devices"

    engine: str = option(
        "auto",
        "Library that communicates, see docs/engines.md; auto: nccl if each rank has a GPU, "
        "otherwise mpi, or gloo under torchrun.",
        choices=ENGINES,
    )
    device: str = option(
        "auto", "cuda: one GPU for each local rank; auto: GPUs if there are any.", choices=DEVICES
    )
    gpu_map: str | None = option(
        None,
        "GPU of each local rank, such as 3,2,1,0.",
        metavar="I,J,...",
        unset="the local rank",
    )
    share_gpus: bool = option(False, "Let several ranks use the same GPU.")

    def check(self) -> None:
        parse_gpu_map(self.gpu_map)

    @property
    def device_wish(self) -> DeviceWish:
        """The device that a rank is to compute on."""
        return DeviceWish(self.device, parse_gpu_map(self.gpu_map), self.share_gpus)


RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class SavingOptions(OptionGroup):
    """Options for results, checkpoints and resuming."""

    title = "Results and checkpoints"

    out: Path | None = option(
        None, "Directory for results.", metavar="DIR", unset=f"a new one in {RUNS}/"
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

    def check(self) -> None:
        if self.resume == "auto" and self.out is None:
            raise UsageError("--resume auto needs --out DIR, the directory to resume")


# The trackers that each option applies to.
_GO_WITH = {
    "tracking_uri": ("mlflow",),
    "experiment": ("mlflow", "wandb"),
    "run_name": ("mlflow", "wandb"),
}


@dataclass(frozen=True, kw_only=True)
class TrackingOptions(OptionGroup):
    """Options for trackers."""

    title = "Tracking"

    track: str = option(
        "",
        f"Trackers to report to, beside metrics.jsonl: any of {', '.join(TRACKERS)}.",
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

    def check(self) -> None:
        named = tracker_names(self.track)
        for name, trackers in _GO_WITH.items():
            if getattr(self, name) is not None and not set(trackers) & set(named):
                raise UsageError(
                    f"--{name.replace('_', '-')} needs --track {' or '.join(trackers)}, got "
                    f"--track {self.track!r}"
                )


NON_FINITE = ("stop", "skip")


@dataclass(frozen=True, kw_only=True)
class MonitoringOptions(OptionGroup):
    """Options for what is monitored and printed while training."""

    title = "Watching"

    log_every: int | None = option(
        None,
        "Steps between two lines of steps.jsonl.",
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
        "stop", "What to do if a loss or gradient is not finite.", choices=NON_FINITE
    )
    quiet: bool = option(False, "Print nothing but errors.")
