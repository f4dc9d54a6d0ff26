"""Options for trackers."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.train.options.checks import not_empty
from hvdtrain.train.options.declare import OptionGroup, option
from hvdtrain.train.tracking.trackers import TRACKERS, tracker_names

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
        """Check that the options of this group go together."""
        named = tracker_names(self.track)
        for name, trackers in _GO_WITH.items():
            if getattr(self, name) is not None and not set(trackers) & set(named):
                raise UsageError(
                    f"--{name.replace('_', '-')} needs --track {' or '.join(trackers)}, got "
                    f"--track {self.track!r}"
                )
