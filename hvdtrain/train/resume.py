"""The progress of a run, which its checkpoints hold, and resuming from one."""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.gradients.plan import BucketSize
from hvdtrain.core.membership import Context
from hvdtrain.errors import UsageError, nearest_name
from hvdtrain.milestones import CONTINUES, RESTARTS, report
from hvdtrain.train.checkpoints import (
    LoadedCheckpoint,
    TensorLibrary,
    checkpoint_files,
    load_checkpoint,
    mark_best,
    newest_good,
    position_of,
)
from hvdtrain.train.config_file import counted
from hvdtrain.train.loop.protocol import (
    Array,
    Framework,
    TrainingLoop,
    TrainingState,
)
from hvdtrain.train.metrics import Totals
from hvdtrain.train.options import RUNS, TrainOptions
from hvdtrain.train.records import (
    MARKER,
    METRICS,
    SUMMARY,
    RanksJoined,
    RanksLost,
    drop_lines_after,
    new_directory,
    prepare_directory,
    usage_errors,
)
from hvdtrain.world import SUPERVISOR, promised_world

# Options that a resume cannot change: the checkpoint would not fit, or its optimizer would bring
# back the old value. Within an epoch the order of the samples must not change either.
_FIXED = ("recipe", "framework", "dtype", "optimizer", "momentum", "weight_decay")
_FIXED_IN_EPOCH = ("seed",)
# `--framework tensorflow`, which was removed, trained the same models as `--framework keras`.
_RENAMED = {("framework", "tensorflow"): "keras"}


@dataclass(frozen=True)
class BestEvaluation:
    """The best evaluation so far."""

    name: str
    value: float
    epoch: float
    step: int
    since: int = 0


@dataclass(frozen=True)
class Progress:
    """What has been done since the very first start; times are rank 0's."""

    epoch: int = 0
    done: int = 0
    step: int = 0
    samples: int = 0
    total_seconds: float = 0.0
    communicate_seconds: float = 0.0
    part: Totals = field(default_factory=Totals)
    best: BestEvaluation | None = None

    def after(self, learned: Totals, steps: int) -> Progress:
        """Return the progress after some more steps of the same epoch."""
        return replace(
            self,
            done=self.done + learned.samples,
            step=self.step + steps,
            samples=self.samples + learned.samples,
            part=self.part + learned,
        )

    def next_epoch(self) -> Progress:
        """Return the progress at the start of the next epoch."""
        return replace(self, epoch=self.epoch + 1, done=0, part=Totals())

    @property
    def text(self) -> str:
        """The progress for people: "3 epochs and 120 samples"."""
        parts = (self.epoch, "epoch"), (self.done, "sample")
        return " and ".join(counted(*part) for part in parts if part[0]) or "0 epochs"


def checkpoint_content(
    progress: Progress, options: TrainOptions, epoch_samples: int
) -> dict[str, Any]:
    """Return what a checkpoint holds besides the state of model and optimizer."""
    part = progress.part
    return {
        **asdict(replace(progress, part=Totals())),
        "epoch_samples": epoch_samples,
        "part": {
            "samples": part.samples,
            "loss": part.loss,
            "counts": {name: np.asarray(counts) for name, counts in part.counts.items()},
        },
        "settings": {name: _setting(options, name) for name in _FIXED + _FIXED_IN_EPOCH},
    }


def _other_model(saved: Mapping[str, Any], own: Mapping[str, Array]) -> str | None:
    """Describe the first difference between saved weights and the model in name or shape."""
    for name, array in own.items():
        if not hasattr(saved.get(name), "shape"):
            return f"it has no {name}"
        if tuple(saved[name].shape) != array.shape:
            return f"{name} has shape {tuple(saved[name].shape)}, and {array.shape} here"
    tensors = [name for name, value in saved.items() if hasattr(value, "shape")]
    extra = next((name for name in tensors if name not in own), None)
    return None if extra is None else f"it has {extra}, which is not here"


def _require_settings(
    path: Path, settings: Mapping[str, Any], options: TrainOptions, names: Sequence[str]
) -> None:
    for name in names:
        own = _setting(options, name)
        if _RENAMED.get((name, settings[name]), settings[name]) != own:
            raise UsageError(f"checkpoint {path} was made with {name} {settings[name]}, not {own}")


def _setting(options: TrainOptions, name: str) -> Any:
    """Return an option; for a recipe in a file only its name, because the file may have moved."""
    location = options.recipe_location
    if name == "recipe" and location.path is not None:
        return f"{location.path.name}:{location.function}"
    return getattr(options, name)


def _progress(content: Mapping[str, Any]) -> Progress:
    """Read the progress; ValueError if a count or a time is invalid."""
    part, best = content["part"], content["best"]
    if not isinstance(part["loss"], float):
        raise ValueError(f"its loss is {part['loss']!r}")
    counts = {name: np.asarray(value, np.float64) for name, value in part["counts"].items()}
    return Progress(
        epoch=_count(content, "epoch"),
        done=_count(content, "done"),
        step=_count(content, "step"),
        samples=_count(content, "samples"),
        total_seconds=float(_count(content, "total_seconds", (int, float))),
        communicate_seconds=float(_count(content, "communicate_seconds", (int, float))),
        part=Totals(_count(part, "samples"), part["loss"], counts),
        best=None if best is None else BestEvaluation(**best),
    )


def _count(content: Mapping[str, Any], name: str, kinds: tuple[type, ...] = (int,)) -> Any:
    value = content[name]
    counts = isinstance(value, kinds) and not isinstance(value, bool)
    if not (counts and 0 <= value < math.inf):
        raise ValueError(f"its {name} is {value!r}")
    return value


@dataclass
class RunState:
    """How far a run has got, where its results are, and what it trains."""

    directory: Path
    # At the last pause; once others have ended, of this rank.
    progress: Progress = field(default_factory=Progress)
    origin: str = ""
    resumed: bool = False
    # Where a pause that is under way began. Survivors of others take it again if one of them was in
    # it. Once others have ended: where this rank may have to begin again.
    pausing: Progress | None = None
    taken: int = 0  # steps since `progress`
    pause_due: bool = False  # after the steps taken
    trained: Any = None  # the weights and everything else that checkpoints hold
    epoch_samples: int = 0  # once others have ended
    failures: Sequence[RanksLost] = ()  # before this start, as `joins`
    joins: Sequence[RanksJoined] = ()

    def start_clock(self, world: Context) -> None:
        """Measure the time of training, and the part of it spent waiting for communication."""
        self._blocked, before = world.blocked, self.progress
        self._total_from = time.perf_counter() - before.total_seconds
        self._communicate_from = world.blocked.seconds - before.communicate_seconds

    @property
    def total_seconds(self) -> float:
        """Seconds since the very first start, pauses between starts excluded."""
        return time.perf_counter() - self._total_from

    def timed(self, progress: Progress) -> Progress:
        """Return progress with the current times."""
        communicate = self._blocked.seconds - self._communicate_from
        return replace(progress, total_seconds=self.total_seconds, communicate_seconds=communicate)

    @property
    def paused(self) -> bool:
        """Whether this rank is through with the last pause, and no other is due."""
        return self.pausing is None and not self.pause_due


@dataclass(frozen=True)
class WorldSettings:
    """Settings that decide how the sums of a run are rounded, as checkpoints hold them."""

    size: int = 0
    threads: tuple[int | None, ...] = ()
    bucket_bytes: int | None = None
    plan: Any = None

    def __post_init__(self) -> None:
        if len(self.threads) != self.size:
            threads, ranks = counted(len(self.threads), "rank"), counted(self.size, "rank")
            raise ValueError(f"it has threads of {threads}, but {ranks}")

    def prepare(self, world: Context, framework: Framework) -> None:
        """Apply the number of threads and the bucket size, before the optimizer is made."""
        if self.size != world.topology.size:
            return
        if self.bucket_bytes is not None:
            size = BucketSize(self.bucket_bytes, "as in the checkpoint")
            world.bucket_sizes[world.world] = size
        threads = self.threads[world.topology.rank]
        if threads is not None:
            framework.use_threads(threads)


def world_settings(
    world: Context, loop: TrainingLoop, threads: tuple[int | None, ...]
) -> dict[str, Any]:
    """Return the current settings as a checkpoint holds them (rank 0 only)."""
    size = world.bucket_sizes.get(world.world)
    return {
        "size": world.topology.size,
        "bucket_bytes": None if size is None else size.nbytes,
        "plan": loop.bucket_plan(),
        "threads": threads,
    }


def announced(options: TrainOptions) -> TrainOptions:
    """Tell `run --elastic` that the run continues if it is started again; return its options."""
    out, promised = options.out, promised_world(os.environ)
    if SUPERVISOR not in os.environ or out is None:
        return options
    if options.resume not in ("auto", "never") and out.resolve() not in (
        Path(options.resume).resolve().parents
    ):
        return options  # another run, whose state would be missing before the first checkpoint
    if promised is None or promised.rank == 0:
        newest = checkpoint_files(out)[:1]
        report(f"{CONTINUES} {newest[0] if newest else ''}", os.environ)
    return replace(options, resume="auto") if int(os.environ.get(RESTARTS, "0")) else options


class StateLoader:
    """Brings back the state that a run continues from, in two steps: here its checkpoint."""

    def __init__(self, options: TrainOptions) -> None:
        self._options = options
        self.found = LoadedCheckpoint()
        self._exchange: dict[str, Any] | None = None

    def find(self, library: TensorLibrary) -> WorldSettings:
        """Find the state, before the model is built; warn about damaged files (rank 0 only)."""
        with usage_errors(self._options.out or RUNS):
            self.found = self._find(library)
        self._warn(self.found.bad)
        try:
            return WorldSettings(**self.found.content.get("world", {}))
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"checkpoint {self.found.path} lacks what is needed: {error}"
            ) from error

    def _find(self, library: TensorLibrary) -> LoadedCheckpoint:
        """Read the checkpoint that the options ask for."""
        options = self._options
        if options.resume == "never":
            return LoadedCheckpoint()
        if options.resume != "auto" or options.out is None:
            path = Path(options.resume)
            return LoadedCheckpoint(path, load_checkpoint(path, library))
        found = newest_good(options.out, library)
        if found.path is None and found.bad:
            raise UsageError(
                f"no checkpoint in {options.out} can be used ({'; '.join(found.bad)}): start again "
                "with another --out"
            )
        return found

    def begin_run(self, epoch_samples: int, state: TrainingState) -> RunState:
        """Load the state, and prepare the directory of the run (rank 0 only)."""
        options, path = self._options, self.found.path
        with usage_errors(options.out or RUNS):
            _refuse_to_mix(options, path)
            progress = self._restore(epoch_samples, state)
            origin = f"{path}, {progress.text} done" if path is not None else ""
            directory = options.out
            if path is None and options.resume == "auto" and directory is not None:
                origin = f"no checkpoint in {directory}: starting with epoch 1{_near(directory)}"
            if options.dry_run:
                directory = Path(tempfile.mkdtemp(prefix="hvdtrain-dry-run-"))
            elif directory is None:
                directory = new_directory(RUNS, Path(options.recipe.partition(":")[0]).stem)
            else:
                prepare_directory(directory)
                (directory / MARKER).unlink(missing_ok=True)  # of an earlier start
                drop_lines_after(directory, progress.step)
                best = progress.best
                inside = path is not None and path.resolve().parent == directory.resolve()
                # Of a run that was killed after writing it and before marking it.
                if path is not None and inside and best and best.step == progress.step:
                    mark_best(path)
        return RunState(directory, progress, origin, path is not None)

    def _restore(self, epoch_samples: int, state: TrainingState) -> Progress:
        """Load what was found if it fits, and return its progress."""
        found, self.found = self.found, LoadedCheckpoint()  # its tensors are as large as the model
        self._exchange = found.content.get("exchange")
        if found.path is None:
            return Progress()
        options, path, content = self._options, found.path, found.content
        try:
            _require_settings(path, content["settings"], options, _FIXED)
            difference = _other_model(content["model"], state.weights())
            if difference is not None:
                raise UsageError(f"checkpoint {path} belongs to another model: {difference}")
            progress = _progress(content)
            if progress.done:
                _require_settings(path, content["settings"], options, _FIXED_IN_EPOCH)
                # Otherwise the rest of the epoch would not be the samples that are left.
                if content["epoch_samples"] != epoch_samples:
                    raise UsageError(
                        f"checkpoint {path} was made within an epoch of {content['epoch_samples']} "
                        f"samples, and this data set has {epoch_samples}: use the same data, or "
                        "resume from a checkpoint at the end of an epoch"
                    )
            state.load(content)
        except UsageError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise UsageError(f"checkpoint {path} lacks what is needed: {error}") from error
        if (progress.epoch, progress.done) > (options.epochs, 0):
            raise UsageError(
                f"checkpoint {path} has {progress.text}, more than --epochs {options.epochs}: ask "
                "for more"
            )
        return progress

    @collective
    def restore_exchange(self, loop: TrainingLoop, resumed: bool) -> None:
        """Restore the state of the exchange of a resumed run; warn about what is lost."""
        lost = loop.restore_exchange(self._exchange) if resumed else ""
        self._exchange = None
        if lost and context.current().topology.rank == 0:
            self._warn([lost])

    def _warn(self, lines: Sequence[str]) -> None:
        for line in lines:
            print(f"hvdtrain: {line}", file=sys.stderr, flush=True)


def _near(place: Path) -> str:
    """Return a hint at a run beside a directory whose name is nearly the same; "" without one."""
    runs = [path for path in place.absolute().parent.glob("*/") if checkpoint_files(path)]
    near = nearest_name(place.name, (path.name for path in runs if path.name != place.name), 0.8)
    return f" (did you mean {place.with_name(near)}?)" if near else ""


def _refuse_to_mix(options: TrainOptions, resumed: Path | None) -> None:
    """Refuse a directory whose results this run would overwrite or mix with its own."""
    if options.out is None or options.resume == "auto":
        return
    files = checkpoint_files(options.out)
    others = [name for name in (METRICS, SUMMARY) if (options.out / name).exists()]
    if not files and not others:
        return
    if resumed is None or resumed.resolve().parent != options.out.resolve():
        raise UsageError(
            f"{options.out} holds the results of another run: resume it with --resume auto, or "
            "name another directory with --out"
        )
    if files and position_of(files[0]) > position_of(resumed):
        raise UsageError(
            f"{options.out} holds a later checkpoint, {files[0].name}: remove it, or name another "
            "directory with --out"
        )
