"""Run a script that uses Accelerate, and say if it forgets the other ranks.

`python -m hvdtrain.launch.scripts.watched SCRIPT ARGUMENT...` is `python SCRIPT ARGUMENT...` with a
thread that waits for Accelerate's state; SCRIPT may be -m MODULE.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from collections.abc import Mapping

_PERIOD_SECONDS = 0.2


def is_lonely(environ: Mapping[str, str]) -> bool | None:
    """Return whether Accelerate takes this rank for the only one; None before it has a state."""
    module = sys.modules.get("accelerate.state")
    # Asked for by its constructor, it would be made.
    state = getattr(getattr(module, "PartialState", None), "_shared_state", {})
    if "num_processes" not in state:
        return None
    return bool(state["num_processes"] == 1 and int(environ.get("WORLD_SIZE", "1")) > 1)


def _watch(environ: Mapping[str, str]) -> None:
    while (lonely := is_lonely(environ)) is None:
        time.sleep(_PERIOD_SECONDS)
    if lonely:
        size = environ["WORLD_SIZE"]
        print(
            f"hvdtrain: Accelerate takes each of the {size} ranks for the only one, so that {size} "
            "models are trained instead of one: on hosts without a GPU it needs "
            "ACCELERATE_USE_CPU=true",
            file=sys.stderr,
            flush=True,
        )


def main() -> None:
    """Run the script or module that the arguments name."""
    del sys.argv[0]
    if os.environ.get("RANK") == "0":  # one rank speaks for all
        watch = threading.Thread(target=_watch, args=[dict(os.environ)], daemon=True)
        watch.start()
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
