"""A command line that a test runs, and all that descends from it; tests use it through ranks."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Self

from paths import HELPERS

RESULTS = "HVDTRAIN_TEST_RESULTS"
_MARK = "HVDTRAIN_TEST_JOB"
_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Completed:
    """A job that has ended; `results` holds what the ranks handed to report(), by rank."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    results: list[Any] = field(default_factory=list)


class Job:
    """A command that runs in a session of its own, and all that descends from it.

    Descendants are found by a mark in their environment: mpirun puts ranks into process groups
    of their own, and a daemon can outlive its parent.
    """

    patience_seconds = 120.0  # in which what needs a second of a core gets it beside other tests

    def __init__(self, argv: list[str], env: Mapping[str, object], cwd: Path | None) -> None:
        self.argv = argv
        self._mark = uuid.uuid4().hex
        self._files = Path(tempfile.mkdtemp(prefix="hvdtrain-test-"))
        for name in ("results", "cwd", "tmp"):
            (self._files / name).mkdir()
        # mpirun that is killed leaves files named by its process number, and one that is given
        # the same number later finds them in its way: every job has its own.
        temporary = {"TMPDIR": self._files / "tmp"}
        own = {_MARK: self._mark, RESULTS: self.results_folder}
        self._started = time.monotonic()
        with open(self._files / "stdout", "wb") as out, open(self._files / "stderr", "wb") as err:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=_environment({**temporary, **env, **own}),
                cwd=cwd or self._files / "cwd",
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._files, ignore_errors=True)

    @property
    def stdout(self) -> str:
        return (self._files / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self._files / "stderr").read_text(errors="replace")

    @property
    def results_folder(self) -> Path:
        return self._files / "results"

    def wait(self, timeout_seconds: float = 300) -> Completed:
        try:
            code = self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.stop()
            self.fail(f"still running after {timeout_seconds} s")
        return Completed(code, self.stdout, self.stderr, time.monotonic() - self._started)

    def end(self, timeout_seconds: float = 300, code: int | None = None) -> Completed:
        """Wait for the end of a job that needs nothing else, as `ended` does."""
        with self:
            return self.ended(timeout_seconds, code)

    def ended(self, timeout_seconds: float = 300, code: int | None = None) -> Completed:
        """Wait for the end, with this exit code if it is given; nothing may be left behind."""
        done = self.wait(timeout_seconds)
        if code not in (None, done.returncode):
            self.fail(f"exit code {done.returncode}")
        self.assert_nothing_left()
        return done

    def wait_for_output(self, text: str, timeout_seconds: float = 300) -> None:
        self.wait_for(lambda: text in self.stdout + self.stderr, f"said {text!r}", timeout_seconds)

    def wait_for(self, test: Callable[[], object], what: str, timeout_seconds: float = 300) -> None:
        deadline = time.monotonic() + timeout_seconds
        while True:
            # First, because it may do so and end while this is between two lines.
            over = self.process.poll() is not None or time.monotonic() > deadline
            if test():
                return
            if over:
                self.fail(f"never {what} (exit code {self.process.poll()})")
            time.sleep(0.02)

    def interrupt(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def pids(self) -> list[int]:
        return list(self._environments())

    def rank_pids(self, np: int) -> dict[int, int]:
        """Return {rank: pid} once `np` ranks run; children of ranks are not ranks."""
        found: dict[int, int] = {}

        def all_run() -> bool:
            of = {pid: rank_of(environ) for pid, environ in self._environments().items()}
            found.update(
                (rank, pid)
                for pid, rank in of.items()
                if rank is not None and of.get(_parent(pid)) is None
            )
            return len(found) >= np

        self.wait_for(all_run, f"had {np} ranks")
        return found

    def stop(self) -> None:
        """End all that this job started: SIGTERM to the command, then SIGKILL to every process."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        while left := self.pids():
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.01)

    def assert_nothing_left(self) -> None:
        deadline = time.monotonic() + self.patience_seconds
        while left := self.pids():
            if time.monotonic() > deadline:
                lines = [f"{pid}: {_command(pid)}" for pid in left]
                self.stop()
                self.fail("\n".join(["processes outlived the job:", *lines, "of"]))
            time.sleep(0.02)

    def results_of_those_left(self, ranks: Collection[int]) -> list[Any]:
        """Return what each of these ranks reported; any other one that did fails the test."""
        found = sorted(int(path.stem) for path in self.results_folder.glob("*.json"))
        if found != sorted(ranks):
            self.fail(f"ranks {found} left results, not {sorted(ranks)}")
        return self.results(max(ranks) + 1, ranks)

    def results(self, np: int, of: Collection[int] | None = None) -> list[Any]:
        payloads = []
        for rank in range(np) if of is None else sorted(of):
            path = self.results_folder / f"{rank}.json"
            if not path.exists():
                self.fail(f"rank {rank} of {np} left no result")
            result = json.loads(path.read_text())
            if result["cases"] < 1:
                self.fail(f"rank {rank} of {np} ran no case")
            payloads.append(result["payload"])
        return payloads

    def fail(self, reason: str) -> NoReturn:
        raise AssertionError(
            f"{reason}: {' '.join(self.argv)}\n"
            f"--- stdout\n{self.stdout[-6000:]}\n--- stderr\n{self.stderr[-6000:]}"
        )

    def _environments(self) -> dict[int, dict[str, str]]:
        found = {}
        for entry in os.scandir("/proc"):
            if entry.name.isdecimal():
                environ = _read_environ(entry.name)
                if environ.get(_MARK) == self._mark:
                    found[int(entry.name)] = environ
        return found


def _environment(env: Mapping[str, object]) -> dict[str, str]:
    """Return this process's environment with `env` over it, fit for a launcher and its ranks."""
    # Open MPI yields by itself only to ranks of one job on one host, and others run beside it.
    kind = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    merged: dict[str, object] = {**kind, **os.environ, "PYTHONPATH": python_path()}
    if os.geteuid() == 0:
        merged |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    merged |= env
    return {name: str(value) for name, value in merged.items() if value is not None}


def python_path(*more: str) -> str:
    """Return where ranks look for modules: the tests', those of this process, and then more."""
    inherited = os.environ.get("PYTHONPATH")
    own = [*map(str, HELPERS), str(Path(__file__).with_name("rank_start"))]
    return os.pathsep.join([*own, *([inherited] if inherited else []), *more])


def _read_environ(pid: str) -> dict[str, str]:
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:  # it has gone, or is another user's
        return {}
    return dict(item.split("=", 1) for item in data.split("\0") if "=" in item)


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return "it has ended meanwhile"
    return f"{shlex.join(words.split(chr(0))[:-1])} (state {_stat(pid)[0]})"


def rank_of(environ: Mapping[str, str]) -> int | None:
    """Return the rank that a launcher gave to the process with this environment."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK"):
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return None


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def is_stopped(pid: int) -> bool:
    return _stat(pid)[0] == "T"


def _stat(pid: int) -> list[str]:
    """Return what Linux tells of a process: its state, its parent, and more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return ["", "0"]
