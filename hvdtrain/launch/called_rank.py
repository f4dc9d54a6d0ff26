"""One rank of `hvdtrain.run`, which starts it."""

from __future__ import annotations

import os
import pickle
import select
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection

from hvdtrain.errors import EXIT_CRASH
from hvdtrain.launch.cluster_environment import ClusterRank, torch_variables
from hvdtrain.world import promised_world

__all__ = ["ADDRESS", "KEY", "STORE", "Answer", "main"]

# Environment variables: where the caller listens, the secret that both share, and a free address
# for a store of torch.distributed.
ADDRESS, KEY, STORE = "HVDTRAIN_CALL_ADDRESS", "HVDTRAIN_CALL_KEY", "HVDTRAIN_CALL_STORE"

# Time for the launcher to end this rank: Open MPI 5's may hang if ranks end before it ends them.
_GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class Answer:
    """What a rank sends back.

    Attributes:
        rank: rank that sends it.
        content: pickled result or exception.
        failure: traceback, or "".
    """

    rank: int
    content: bytes
    failure: str = ""


def main() -> None:
    """Receive the call, run it and send the answer (local)."""
    key = bytes.fromhex(os.environ.pop(KEY))
    world = promised_world(os.environ)
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    # All ranks are on the caller's host.
    place = ClusterRank(rank, size, rank, size, 0, (os.environ.pop(STORE),))
    os.environ.update(torch_variables(place))
    # Open until this process ends; the caller's end closes when the caller ends.
    caller = Client(os.environ.pop(ADDRESS), "AF_UNIX", authkey=key)
    name = "hvdtrain-caller"
    threading.Thread(target=_end_with, args=[caller], name=name, daemon=True).start()
    sys.path[:], call = pickle.loads(caller.recv_bytes())
    answer = _called(call, rank)
    caller.send(answer)
    if answer.failure:
        sys.stdout.flush()
        sys.stderr.flush()
        # A normal exit would wait for the other ranks, which the launcher is about to end.
        os._exit(EXIT_CRASH)


def _end_with(caller: Connection) -> None:
    """End this process when the caller ends, because a launcher that fails as it exits does not."""
    closing = select.poll()
    closing.register(caller.fileno(), select.POLLRDHUP)  # the main thread reads
    closing.poll()
    time.sleep(_GRACE_SECONDS)
    os._exit(EXIT_CRASH)


def _called(call: bytes, rank: int) -> Answer:
    import cloudpickle

    try:
        function, args, kwargs = pickle.loads(call)
        return Answer(rank, cloudpickle.dumps(function(*args, **kwargs)))
    except BaseException as error:  # SystemExit, for example, is no result either
        return Answer(rank, _dumped(error), traceback.format_exc())


def _dumped(error: BaseException) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(error))
    except Exception:  # it cannot be pickled; its traceback is sent anyway
        return b""


if __name__ == "__main__":
    # The caller finds the class of the pickled answer by the module's name, not in __main__.
    from hvdtrain.launch import called_rank

    called_rank.main()
