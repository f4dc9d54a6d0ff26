"""Start an elastic job again when the launcher has given it up."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.errors import EXIT_CRASH, EXIT_REQUEUE
from hvdtrain.launch.answering import answering, on_hosts
from hvdtrain.launch.launchers.request import Builder, LaunchRequest, Site, has_allocation
from hvdtrain.launch.listener import MilestoneListener
from hvdtrain.launch.session_folder import SESSION
from hvdtrain.launch.supervise import Launches
from hvdtrain.supervision.milestones import ENDED, FAILED, LOST, RESTARTS, STARTED, SUPERVISOR

_MOST_IN_VAIN = 3
# Ranks of the same host notice it themselves. Others may be in init(), and go on without it.
_JOIN_SECONDS = 10.0
# Ranks that have not begun so long after the first one have ended in Python's own start.
_BEGIN_SECONDS = 60.0


@dataclass(frozen=True)
class Saved:
    """Where a job that is started again goes on."""

    newest: Callable[[], str | None]
    program: tuple[str, ...]


@dataclass(frozen=True)
class ElasticJob:
    """A job whose ranks go on when others are killed."""

    request: LaunchRequest
    build: Builder
    site: Site
    least: int
    saved: Saved | None


def run_elastic(
    job: ElasticJob, launches: Launches, environ: Mapping[str, str], folder: Path
) -> int:
    """Run a job to its end, and start it again if the launcher ends before its ranks have."""
    remote = job.request.names_hosts or has_allocation(environ)
    with MilestoneListener(remote) as listener:
        return _Starts(job, launches, environ, folder, listener).run()


class _Starts:
    """The starts of a job."""

    def __init__(
        self,
        job: ElasticJob,
        launches: Launches,
        environ: Mapping[str, str],
        folder: Path,
        listener: MilestoneListener,
    ) -> None:
        self._job, self._launches, self._folder = job, launches, folder
        self._environ, self._listener = environ, listener
        self._request, self._restarts, self._in_vain = job.request, 0, 0
        self._trained = False
        self._heard: set[str] = set()
        self._first: float | None = None  # when the first rank had begun
        self._lost_since: float | None = None
        self._checkpoint = self._newest()

    def run(self) -> int:
        """Run the job to its end."""
        while True:
            self._listener.renew()
            self._heard, self._first, self._lost_since = set(), None, None
            code = self._launch()
            heard = self._heard = self._heard | self._listener.heard()
            if self._launches.asked is not None or code == EXIT_REQUEUE or ENDED in heard:
                return code
            if FAILED in heard:
                return code or EXIT_CRASH
            self._launches.end_orphans()
            end = self._prepare(code, heard)
            # Ctrl-C also ends the launchers that ask the hosts, which then seem lost.
            asked = self._launches.waiting()
            if asked is not None:
                return 128 + asked
            if end is not None:
                return end

    def _launch(self) -> int:
        variables = {SUPERVISOR: self._listener.address, RESTARTS: str(self._restarts)}
        exports = {**self._request.exports, **dict.fromkeys(variables)}
        line = self._job.build(replace(self._request, exports=exports), self._job.site)
        environ = {**self._environ, **line.variables, **variables}
        return self._launches.run(line.argv, environ, self._is_lost)

    def _is_lost(self) -> bool:
        """Return whether a rank has ended for which the others would wait in init() for ever."""
        self._heard |= self._listener.heard()
        if not self._heard or self._heard & {STARTED, ENDED, FAILED}:
            return False
        now = time.monotonic()
        self._first = self._first or now
        if LOST in self._heard:
            self._lost_since = self._lost_since or now
        missing = self._listener.began < (self._ranks() or 0) and now - self._first > _BEGIN_SECONDS
        lost = self._lost_since is not None and now - self._lost_since > _JOIN_SECONDS
        if not (missing or lost):
            return False
        _say("a rank has ended before all had started: the job ends")
        return True

    def _prepare(self, code: int, heard: set[str]) -> int | None:
        """Prepare the next start, and say so; or return the exit code of the job."""
        failure = code or EXIT_CRASH
        what = f"the job was ended before its end (mpirun's exit code {code})"
        self._trained |= STARTED in heard
        if self._trained and self._job.saved is None:
            _say(f"{what}: it is not started again, because no checkpoint holds its state")
            return failure
        before = self._request.hosts
        hosts = answering(self._request, self._start, self._folder)
        lost = [host.name for host in before if host not in hosts]
        if code and not heard and (not lost or not hosts):  # mpirun says why nothing began
            return code
        if lost:
            what += f", {', '.join(lost)} no longer {'answer' if len(lost) > 1 else 'answers'}"
        if before:
            file = self._folder / f"hosts.{self._restarts}"
            self._request = on_hosts(self._request, hosts, file)
        ranks = self._ranks()
        if (before and not hosts) or (ranks is not None and ranks < self._job.least):
            left = f"{_counted(ranks if hosts or not before else 0)} could start again"
            _say(f"{what}: {left}, fewer than --min-np {self._job.least}")
            return EXIT_REQUEUE
        if self._gives_up():
            _say(f"{what}: it is not started again, after {self._in_vain} starts without progress")
            return failure
        self._restarts += 1
        where = f" from {self._checkpoint}" if self._checkpoint else " from the beginning"
        many = "" if ranks is None else f" with {_counted(ranks)}"
        _say(f"{what}: starting again{many}{where}")
        return None

    def _gives_up(self) -> bool:
        """Note the newest checkpoint; return whether starts have often led to no new one."""
        before, self._checkpoint = self._checkpoint, self._newest()
        self._in_vain = 0 if self._checkpoint != before else self._in_vain + 1
        if self._job.saved is not None and (self._trained or self._checkpoint):
            self._request = replace(self._request, program=self._job.saved.program)
        return self._in_vain > _MOST_IN_VAIN

    def _newest(self) -> str | None:
        return None if self._job.saved is None else self._job.saved.newest()

    def _ranks(self) -> int | None:
        request = self._request
        if request.ranks is not None:
            return request.ranks
        slots = [request.per_node or host.slots for host in request.hosts]
        known = [count for count in slots if count is not None]
        return sum(known) if known and len(known) == len(slots) else None

    def _start(self, request: LaunchRequest) -> subprocess.Popen[bytes]:
        line = self._job.build(request, self._job.site)
        environ = {**self._environ, **line.variables}
        # One that ends removes files of others in the same directory, which then wait for ever.
        environ[SESSION] = tempfile.mkdtemp(dir=self._folder)
        return self._launches.start(line.argv, environ, quiet=True)


def _counted(ranks: int | None) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _say(text: str) -> None:
    print(f"hvdtrain: {text}", file=sys.stderr, flush=True)
