"""The stages of a build: build the wheel, install it, test it on two ranks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.files import replacing
from hvdtrain.horovod.build.compiler_wrapper import script
from hvdtrain.horovod.build.plan import (
    CMAKE,
    HOROVOD_VERSION,
    TOOLS,
    BuildPlan,
    Toolchain,
    installed_versions,
    variables,
)
from hvdtrain.launch.launchers.choice import own_launcher
from hvdtrain.launch.launchers.request import LaunchRequest

# The most relevant kind of line first: what follows a compiler error is mostly noise.
_TELLING = (
    re.compile(
        r": (fatal )?error:|undefined reference|CMake Error|Could NOT find|No space left|Killed"
    ),
    re.compile(r"\berror\b", re.IGNORECASE),
    re.compile(r"\S"),
)
_SHOWN_LINES = 8
_SHOWN_CHARACTERS = 300


class BuildFailedError(HvdtrainError):
    """A command of the build failed; the message has its last relevant lines and names the log."""


class Log:
    """A file to which all commands of a build write."""

    def __init__(self, file: IO[str], path: Path) -> None:
        self._file, self._path = file, path

    def run(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        on_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Run a command to its end."""
        self._file.write(f"\n$ {' '.join(command)}\n")
        lines: list[str] = []
        with subprocess.Popen(
            command,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None  # it is a pipe
            for line in process.stdout:
                self._file.write(line)
                self._file.flush()
                lines.append(line.rstrip()[:_SHOWN_CHARACTERS])
                on_line(line)
        if process.returncode != 0:
            shown = "".join(f"\n  {line.strip()}" for line in _telling(lines))
            raise BuildFailedError(
                f"{Path(command[0]).name} ended with code {process.returncode}; its output "
                f"is in {self._path}; it ended with:{shown}"
            )


def _telling(lines: Sequence[str]) -> Sequence[str]:
    kinds = ([line for line in lines if kind.search(line)] for kind in _TELLING)
    return next(filter(None, kinds), [])[-_SHOWN_LINES:]


@contextmanager
def _stage(title: str) -> Iterator[Callable[[str], None]]:
    """Time a stage and report it, also if it raises; yield what shows a short text on its progress.

    On a terminal there is a spinner meanwhile.
    """
    started, outcome, on_terminal = time.monotonic(), "failed after ", sys.stdout.isatty()
    start = f"{title} ... "
    if not on_terminal:
        print(start, end="", flush=True)
    try:
        with _spinner(title) if on_terminal else nullcontext(lambda text: None) as detail:
            yield detail
        outcome = ""
    finally:
        seconds = time.monotonic() - started
        print(f"{start if on_terminal else ''}{outcome}{seconds:.0f} s", flush=True)


@contextmanager
def _spinner(title: str) -> Iterator[Callable[[str], None]]:
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task(title)
        yield lambda text: progress.update(task, description=f"{title} {text}")


_REQUIREMENT = f"horovod=={HOROVOD_VERSION}"
_MOST_JOBS = 8
_JOB_BYTES = 2 << 30  # memory of the compiler for a file that includes all of torch
_PERCENT = re.compile(r"\[ *(\d+)%\]")
# Packages that the installation must not change.
_KEPT = ("torch", "tensorflow", "keras", "numpy", "mpi4py")


def build_and_install(plan: BuildPlan, wheel_only: bool) -> Path:
    """Build the wheel unless there is one, install it, and try it; return its path.

    The tools are in a temporary directory, so that the user's environment stays as it is; the log
    stays.
    """
    with (
        tempfile.TemporaryDirectory(prefix="hvdtrain-horovod-") as folder,
        open(plan.log, "w", encoding="utf-8") as file,
    ):
        workshop = _Workshop(Path(folder), Log(file, plan.log), plan)
        workshop.prepare()
        wheel = plan.source if isinstance(plan.source, Path) else workshop.build(plan.source)
        if not wheel_only:
            workshop.install(wheel)
            workshop.try_on_two_ranks()
    return wheel


class _Workshop:
    """A directory with tools of its own."""

    def __init__(self, folder: Path, log: Log, plan: BuildPlan) -> None:
        self._folder, self._log, self._plan = folder, log, plan
        (folder / "tmp").mkdir()
        self._variables = {
            **os.environ,
            "TMPDIR": str(folder / "tmp"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_INPUT": "1",
        }
        self._python = folder / "tools" / "bin" / "python"

    def prepare(self) -> None:
        """Create the environment of the tools."""
        with _stage("preparing build tools"):
            venv = [sys.executable, "-m", "venv", str(self._folder / "tools")]
            self._log.run(venv, self._variables)
            # Installed packages must be visible to the tools: Horovod's build imports torch.
            names = ("site-packages", "dist-packages")
            seen = [path for path in sys.path if os.path.basename(path) in names]
            (own,) = (self._folder / "tools" / "lib").glob("python*/site-packages")
            lines = [f"import site; site.addsitedir({path!r})\n" for path in seen]
            (own / "outside.pth").write_text("".join(lines))
            if isinstance(self._plan.source, Toolchain):
                self._get_tools([*TOOLS, *([] if self._plan.source.cmake else [CMAKE])])

    def _get_tools(self, wanted: Sequence[str]) -> None:
        # The user's constraints are for their environment.
        own = {name: text for name, text in self._variables.items() if name != "PIP_CONSTRAINT"}
        try:
            self._log.run([str(self._python), "-m", "pip", "install", *wanted], own)
        except BuildFailedError as error:
            raise UsageError(
                f"pip cannot get the tools of the build ({', '.join(wanted)}): {error}"
            ) from error

    def build(self, toolchain: Toolchain) -> Path:
        """Compile Horovod, put the wheel into the cache and return its path there."""
        plan = self._plan
        wrapper = self._folder / "c++"
        wrapper.write_text(script(toolchain.compiler, plan.target.runpath))
        wrapper.chmod(0o755)
        cmake = toolchain.cmake or self._python.with_name("cmake")
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        cores = len(os.sched_getaffinity(0))
        jobs = max(1, min(_MOST_JOBS, cores, free_bytes // _JOB_BYTES))
        mpi = toolchain.mpicxx.parent
        path = os.pathsep.join([str(mpi), self._variables.get("PATH", "")])
        own = variables(plan.target, wrapper, cmake, jobs)
        built = self._folder / "wheel"
        flags = ["--no-build-isolation", "--use-pep517", "--no-deps", "--no-cache-dir", "-v"]
        with _stage(f"compiling with {jobs} processes, some minutes") as detail:
            self._pip(
                ["wheel", *flags, "--no-binary", "horovod", "-w", str(built), _REQUIREMENT],
                {**own, "PATH": path, "MPI_HOME": str(mpi.parent)},
                lambda line: detail(f"{found[1]} %") if (found := _PERCENT.search(line)) else None,
            )
        (wheel,) = built.glob("horovod-*.whl")
        plan.folder.mkdir(parents=True, exist_ok=True)
        kept = plan.folder / wheel.name
        with replacing(kept) as copy, open(wheel, "rb") as source:
            shutil.copyfileobj(source, copy)
        return kept

    def install(self, wheel: Path) -> None:
        """Install the wheel and its dependencies, and nothing else, into this environment."""
        constraints = self._folder / "constraints.txt"
        kept = installed_versions(_KEPT)
        constraints.write_text("".join(f"{name}=={kept[name]}\n" for name in kept))
        here = ["--python", sys.executable, "install", "--constraint", str(constraints)]
        with _stage("installing"):
            self._pip([*here, "--force-reinstall", "--no-deps", str(wheel)])
            self._pip([*here, _REQUIREMENT])

    def try_on_two_ranks(self) -> None:
        """All-reduce through each framework that Horovod was built for."""
        plan = self._plan
        for name in plan.target.frameworks:
            program = (sys.executable, "-m", "hvdtrain.probes", "horovod", name)
            launcher = own_launcher(plan.mpi, str(plan.mpirun))
            line = launcher.command(LaunchRequest(program, ranks=2), os.environ)
            with _stage(f"two ranks all-reduce through horovod.{name}"):
                self._log.run(line.argv, {"OMP_NUM_THREADS": "1", **os.environ, **line.variables})

    def _pip(
        self,
        arguments: list[str],
        own: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        command = [str(self._python), "-m", "pip", *arguments]
        self._log.run(command, {**self._variables, **(own or {})}, on_line)
