"""Open an engine on one rank: `python -m hvdtrain.probes.engine NAME`."""

from __future__ import annotations

import json
import os
import sys

from hvdtrain.config import Config
from hvdtrain.engines.registry import open_world
from hvdtrain.errors import HvdtrainError


def main(name: str) -> None:
    """Print whether the engine is available, and its library or the reason why it is not."""
    try:
        world = open_world(name, Config(), os.environ)
    except HvdtrainError as error:
        print(json.dumps({"available": False, "reason": str(error)}))
    else:
        print(json.dumps({"available": True, "library": world.library}))
        world.communicator.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
