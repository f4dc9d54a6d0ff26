"""Training from Python: the function `fit`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.collective import collective
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.records import Summary
from hvdtrain.train.session import train

__all__ = ["fit"]


@collective
def fit(recipe: str | Path | Callable[..., Recipe], **options: Any) -> Summary | None:
    """Train a recipe on all ranks of this job, or on one without a launcher (collective).

        fit(recipe, set={"width": 96}, epochs=20, checkpoint_every="10 minutes")

    Args:
        recipe: function that returns a Recipe and is called once random generators are seeded; or,
            as on the command line, a built-in name or FILE.py[:FUNCTION].
        **options: options of `python -m hvdtrain train`, with _ for -; `set` holds the arguments of
            the function.

    Returns:
        A Summary, with the fields of summary.json as attributes; None if a signal stopped the run.

    Raises:
        TypeError: there is no such option.
        UsageError: an option is invalid, or does not fit the number of ranks, the data or the
            directory.
        TrainingError: weights differ between ranks, or a loss or gradient is not finite.
    """
    for name in ("out", "data_dir"):
        if isinstance(options.get(name), str):
            options[name] = Path(options[name])
    if not callable(recipe):
        return train(TrainOptions(recipe=str(recipe), **options))
    asked = TrainOptions(recipe=_location(recipe), **options)
    data_dir = {} if asked.data_dir is None else {"data_dir": asked.data_dir}
    return train(asked, partial(recipe, **asked.set, **data_dir))


def _location(function: Callable[..., Recipe]) -> str:
    """Return the file and the name of a function, for the run's records and to find it again."""
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        file = None
    name = getattr(function, "__name__", "recipe")
    return f"{file if file and file.endswith('.py') else 'session.py'}:{name.strip('<>')}"
