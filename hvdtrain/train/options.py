"""What a person can ask of a training run, checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.devices import DeviceWish, parse_gpu_map
from hvdtrain.engines import registry
from hvdtrain.errors import UsageError
from hvdtrain.train.schedule import SCALINGS, scaled_lr

__all__ = [
    "BACKENDS",
    "DEFAULT_BATCH_SIZE",
    "DEFAULT_LR",
    "DEVICES",
    "DTYPES",
    "ENGINES",
    "FRAMEWORKS",
    "OPTIMIZERS",
    "RECIPES",
    "RUNS",
    "SGD_MOMENTUM",
    "TrainOptions",
]

RECIPES = ("digits",)
FRAMEWORKS = ("torch", "tensorflow", "keras")
BACKENDS = ("tensorflow", "torch", "jax")
ENGINES = ("auto", *registry.ENGINES)
OPTIMIZERS = ("sgd", "adam")
DTYPES = ("float32", "float64")
DEVICES = ("auto", "cpu", "cuda")

DEFAULT_BATCH_SIZE = 16
DEFAULT_LR = {"sgd": 0.02, "adam": 0.001}
SGD_MOMENTUM = 0.9
RUNS = Path("runs")


@dataclass(frozen=True)
class TrainOptions:
    """Options of one training run; the same on every rank.

    Attributes:
        recipe: name of the model and its data.
        framework: which framework trains.
        backend: what Keras runs on; None: what KERAS_BACKEND says, or tensorflow.
        engine: which engine moves the gradients.
        epochs: passes over the training data, counted from the very first start.
        batch_size: samples per rank and step; None together with global_batch_size: a default.
        global_batch_size: samples of all ranks per step, instead of batch_size.
        lr: learning rate for one rank; None: a default that fits the optimizer.
        lr_scaling: how the rate grows with the number of ranks.
        warmup_epochs: epochs over which the rate goes from lr to the scaled one.
        optimizer: sgd (with SGD_MOMENTUM) or adam.
        dtype: element type of weights and arithmetic.
        seed: of the first weights and of the order of the samples.
        out: directory for results; None: a new one in RUNS.
        resume: "never", "auto" (newest good checkpoint in out), or a checkpoint file.
        virtual_shards: parts of each global batch, a power of two, whose gradients are computed
            one by one and summed in one order, so that the weights have the same bits on any
            number of ranks that is a power of two; None: one part for each rank.
        device: "auto" takes a GPU where there is one.
        gpu_map: by local rank, the index of its GPU, as in "3,2,1,0"; None: the local rank.
        share_gpus: ranks may have the same GPU.
        quiet: print nothing but errors.

    Raises:
        UsageError: a value makes no sense; the message names the option.
    """

    recipe: str = "digits"
    framework: str = "torch"
    backend: str | None = None
    engine: str = "auto"
    epochs: int = 15
    batch_size: int | None = None
    global_batch_size: int | None = None
    lr: float | None = None
    lr_scaling: str = "linear"
    warmup_epochs: float = 5.0
    optimizer: str = "sgd"
    dtype: str = "float32"
    seed: int = 0
    out: Path | None = None
    resume: str = "never"
    virtual_shards: int | None = None
    device: str = "auto"
    gpu_map: str | None = None
    share_gpus: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        _check_name("recipe", self.recipe, RECIPES)
        _check_name("--framework", self.framework, FRAMEWORKS)
        if self.backend is not None:
            _check_name("--backend", self.backend, BACKENDS)
            if self.framework != "keras":
                raise UsageError(f"--backend {self.backend} goes with --framework keras only")
        _check_name("--engine", self.engine, ENGINES)
        _check_name("--lr-scaling", self.lr_scaling, SCALINGS)
        _check_name("--optimizer", self.optimizer, OPTIMIZERS)
        _check_name("--dtype", self.dtype, DTYPES)
        _check_name("--device", self.device, DEVICES)
        parse_gpu_map(self.gpu_map)
        _check_count("--epochs", self.epochs)
        _check_count("--batch-size", self.batch_size)
        _check_count("--global-batch-size", self.global_batch_size)
        if self.batch_size is not None and self.global_batch_size is not None:
            raise UsageError("--batch-size and --global-batch-size exclude each other: give one")
        _check_count("--virtual-shards", self.virtual_shards)
        if self.virtual_shards is not None and self.global_batch_size is None:
            raise UsageError(
                "--virtual-shards needs --global-batch-size: a batch that grows with the ranks "
                "cannot give the same weights on any number of them"
            )
        if self.virtual_shards is not None and self.framework != "torch":
            raise UsageError("--virtual-shards goes with --framework torch only")
        if self.engine == "nccl" and self.framework != "torch":
            raise UsageError(
                f"--engine nccl goes with --framework torch only: gradients of {self.framework} "
                "are reduced in host memory"
            )
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise UsageError(f"--lr must be a positive number, got {self.lr}")
        if not (math.isfinite(self.warmup_epochs) and self.warmup_epochs >= 0):
            raise UsageError(f"--warmup-epochs must be 0 or more, got {self.warmup_epochs}")
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"--seed must be between 0 and 2^63 - 1, got {self.seed}")
        if self.resume == "auto" and self.out is None:
            raise UsageError("--resume auto needs --out DIR, the directory to go on in")

    @property
    def device_wish(self) -> DeviceWish:
        """What a rank is to compute on."""
        return DeviceWish(self.device, parse_gpu_map(self.gpu_map), self.share_gpus)

    @property
    def base_lr(self) -> float:
        """The learning rate for one rank."""
        return DEFAULT_LR[self.optimizer] if self.lr is None else self.lr

    def scaled_lr(self, size: int) -> float:
        """Return the learning rate for `size` ranks, reached after the warm-up.

        With virtual shards it is that of one rank, whatever the size.
        """
        if self.virtual_shards is not None:
            return self.base_lr
        return scaled_lr(self.base_lr, size, self.lr_scaling)

    def samples_per_step(self, size: int) -> int:
        """Return the global batch size for `size` ranks."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        return (self.batch_size or DEFAULT_BATCH_SIZE) * size


def _check_name(option: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise UsageError(f"unknown {option} {value!r}: choose from {', '.join(known)}")


def _check_count(option: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise UsageError(f"{option} must be at least 1, got {value}")
