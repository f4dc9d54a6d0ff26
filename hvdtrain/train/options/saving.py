"""Options for results, checkpoints and resuming."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.train.options.checks import at_least, every, not_empty
from hvdtrain.train.options.declare import OptionGroup, option

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
        """Check that the options of this group go together."""
        if self.resume == "auto" and self.out is None:
            raise UsageError("--resume auto needs --out DIR, the directory to go on in")
