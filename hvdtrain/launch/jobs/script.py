"""The script of a job: what the scheduler reads, the launch, and how it starts again."""

from __future__ import annotations

import shlex

from hvdtrain.launch.jobs.launching import launch_line
from hvdtrain.launch.jobs.request import Request
from hvdtrain.launch.jobs.schedulers import SCHEDULERS, Scheduler

__all__ = ["body", "job_script"]

# The scheduler sends USR1 to this shell. The trap interrupts `wait`, which then starts again.
_PASSED_ON = """\
trap 'kill -USR1 "$pid"' USR1
{launch} &
pid=$!
while kill -0 "$pid" 2> /dev/null; do wait "$pid"; done
wait "$pid"
code=$?
"""
# The scheduler sends USR1 to the ranks, and to this shell, which must live on.
_WARNED = """\
trap : USR1
{launch}
code=$?
"""
_TIMED = """\
timeout --preserve-status --signal=USR1 {seconds} \\
  {launch}
code=$?
"""
_FORMS = {"shell": _PASSED_ON, "all": _WARNED, "": _TIMED}
_END = """\

if [[ -e $OUT/requeue ]]; then
{again}
fi
exit "$code"
"""


def job_script(name: str, request: Request) -> str:
    """Return the script for a scheduler.

    Args:
        name: one of SCHEDULERS.
        request: the job.
    """
    scheduler = SCHEDULERS[name]
    head = ["#!/bin/bash", *scheduler.directives(request), "", ""]
    return "\n".join(head) + body(request, scheduler)


def body(request: Request, scheduler: Scheduler) -> str:
    """Return the lines that the shell of a job runs."""
    index = f'"-${scheduler.array}"' if request.array else ""
    lines = [
        "# Modules and variables of this site belong here.",
        *(f"module load {shlex.quote(module)}" for module in request.modules),
        "ulimit -c 0",
        *scheduler.setup(request),
        f"export OMP_NUM_THREADS={request.cpus_per_rank}",
        f"export OUT={shlex.quote(request.out)}{index}",
        'rm -f "$OUT/requeue"',
        "",
    ]
    start = _FORMS[scheduler.warns].format(
        launch=launch_line(request, scheduler.hostfile),
        seconds=request.seconds - request.notice_seconds,
    )
    again = "\n".join(f"  {line}" for line in scheduler.again(request))
    return "\n".join([*lines, start]) + _END.format(again=again)
