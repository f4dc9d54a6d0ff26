"""Jobs side by side: equal parts of a job's ranks, each with a launcher of its own."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts.host import Host, is_here, total_slots
from hvdtrain.launch.launchers.request import LaunchRequest
from hvdtrain.launch.supervise import PASSED_ON, bound_to_this_process

_GPUS, _THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"


def _parts(hosts: Sequence[Host], each: int) -> list[tuple[list[Host], int | None]]:
    """Return hosts with `each` slots together; if only a part of one host, also its first slot."""
    found, waiting = list[tuple[list[Host], int | None]](), list[Host]()
    for host in hosts:
        slots = host.slots or 1
        for first in range(0, slots - each + 1, each):
            found.append(([replace(host, slots=each)], first if slots > each else None))
        if slots < each:
            waiting.append(replace(host, slots=min(slots, each - total_slots(waiting))))
            if total_slots(waiting) == each:
                found.append((waiting, None))
                waiting = []
    return found


def divided(
    request: LaunchRequest,
    ranks: int,
    each: int,
    cores: int,
    environ: Mapping[str, str],
    share: bool = False,
) -> list[LaunchRequest]:
    """Return the requests for jobs of `each` ranks in place of one of `ranks`, on `cores` cores.

    If ranks may `share` GPUs, a host may have fewer GPUs than slots.
    """
    here, requests = not request.hosts, list[LaunchRequest]()
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    known = environ[_GPUS].split(",") if _GPUS in environ else [str(one) for one in range(count)]
    one_for_each_slot = [] if share else [str(one) for one in range(ranks)]
    parts = _parts(request.hosts or [Host("", ranks)], each)[: ranks // each]
    for number, (hosts, first) in enumerate(parts):
        exports, folder = dict(request.exports), request.log_folder
        # Those of other hosts are not known.
        gpus = known if here or is_here(hosts[0].name) else one_for_each_slot
        # Local ranks of each job count from 0, and would take the GPUs of another one.
        if first is not None and gpus:
            chosen = dict.fromkeys(gpus[slot % len(gpus)] for slot in range(first, first + each))
            exports.setdefault(_GPUS, ",".join(chosen))
        if here and _THREADS not in environ:
            exports.setdefault(_THREADS, str(max(1, cores // ranks)))
        own = replace(request, ranks=each, hosts=() if here else tuple(hosts), hostfile=None)
        folder = folder and f"{folder}/job-{number}"
        requests.append(replace(own, exports=exports, log_folder=folder))
    return requests


def run_at_once(starts: Sequence[Callable[[], int]]) -> list[int]:
    """Call functions in processes of their own, pass signals on, and return the exit codes."""
    passed_on = {n for n in PASSED_ON if signal.getsignal(n) != signal.SIG_IGN}
    # If the parent had it ignored, the kernel would keep no exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on | {signal.SIGCHLD})
    begin, codes = bound_to_this_process(mask), dict[int, int | None]()
    for start in starts:
        process_id = os.fork()
        if process_id == 0:
            code = 1
            try:
                begin()
                code = start()
            except UsageError as error:
                print(f"hvdtrain: {error}", file=sys.stderr, flush=True)
                code = error.exit_code
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        codes[process_id] = None
    while running := [process_id for process_id, code in codes.items() if code is None]:
        found = signal.sigtimedwait(passed_on | {signal.SIGCHLD}, 0.5)
        for process_id in running:
            # The terminal sends Ctrl-C to all processes: only signals of processes are passed on.
            if found is not None and found.si_signo != signal.SIGCHLD and found.si_code <= 0:
                os.kill(process_id, found.si_signo)
            ended, status = os.waitpid(process_id, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                codes[process_id] = code if code >= 0 else 128 - code
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return [code or 0 for code in codes.values()]
