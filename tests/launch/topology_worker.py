"""Reports the place of this rank, after it has talked to all others. Needs no framework."""

import dataclasses
import os
import socket

from ranks import report

from hvdtrain.core import context, objects
from hvdtrain.world import promised_world


def main() -> None:
    context.init()
    here = context.current()
    promised = promised_world(os.environ)
    heard = objects.allgather_object((here.topology.rank, socket.gethostname()))
    report(
        cases=1,
        payload={
            **dataclasses.asdict(here.topology),
            "heard": heard,
            "library": here.library,
            "promised": promised and (promised.rank, promised.size),
            "bucket_bytes": here.config.bucket_bytes,
        },
    )
    context.shutdown()


main()
