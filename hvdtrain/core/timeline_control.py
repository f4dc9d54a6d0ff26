"""Functions to start and stop a timeline while the job runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.agreement.channel import Submission
from hvdtrain.core.agreement.operation import Operation, Request
from hvdtrain.core.collectives.gathers import Barrier
from hvdtrain.core.objects import call_on_root
from hvdtrain.core.timeline.file import TimelineError, usable_path
from hvdtrain.core.timeline.start_stop import begin, write_timeline
from hvdtrain.engines.communicator import Communicator


class _Together(Operation):
    """Call a function with the communicator when all ranks have agreed on it."""

    def __init__(self, request: Request, function: Callable[[Communicator], object]) -> None:
        super().__init__()
        self.request = request
        self._function = function

    def execute(self, communicator: Communicator) -> object:
        return self._function(communicator)


@collective
def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Start recording the waiting and communication times of all operations (collective).

    Args:
        file_path: file to which rank 0 writes the timeline of all ranks when it stops.
        mark_cycles: whether to mark the beginning of each round, which Horovod calls a cycle.

    Raises:
        ValueError: a timeline is being recorded already, or rank 0 cannot write the file.
    """
    here = context.current()
    if here.recording is not None:
        raise TimelineError(
            f"{here.topology.title} start_timeline: a timeline is being recorded already, to "
            f"{here.recording.path}: call stop_timeline() first"
        )
    path = call_on_root(partial(usable_path, os.fspath(file_path)))
    request = Request("start_timeline", details=(("mark_cycles", str(bool(mark_cycles))),))
    host = here.topology.hostnames[here.topology.rank]
    start = partial(begin, path=path, marks_rounds=bool(mark_cycles), host=host)
    here.record(Submission(here.world, _Together(request, start)).run())


@collective
def stop_timeline() -> None:
    """Stop recording and write the file (collective); does nothing without a recording.

    Raises:
        ValueError: on rank 0, the file cannot be written.
    """
    here = context.current()
    recording = here.recording
    if recording is None:
        return
    Submission(here.world, Barrier("stop_timeline")).run()
    here.record(None)
    gather = partial(write_timeline, recording=recording, hostnames=here.topology.hostnames)
    Submission(here.world, _Together(Request("gather the timeline"), gather)).run()
