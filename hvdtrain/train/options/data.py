"""Options for the amount of data per step and per run."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.train.options.checks import at_least, every, one_of
from hvdtrain.train.options.declare import OptionGroup, option

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
        "When ranks are killed and the others go on: keep the samples of all ranks per step and "
        "the learning rate, or rescale both to the ranks that are left.",
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
        """Check that the options of this group go together."""
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
