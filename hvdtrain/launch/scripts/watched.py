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


def _watch(size: str) -> None:
    """Wait until Accelerate has a state; asked for by its constructor, it would be made."""
    state: Mapping[str, object] = {}
    while "num_processes" not in state:
        time.sleep(_PERIOD_SECONDS)
        module = sys.modules.get("accelerate.state")
        state = getattr(getattr(module, "PartialState", None), "_shared_state", {})
    if state["num_processes"] == 1 and int(size) > 1:
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
        size = os.environ.get("WORLD_SIZE", "1")
        threading.Thread(target=_watch, args=[size], daemon=True).start()
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
