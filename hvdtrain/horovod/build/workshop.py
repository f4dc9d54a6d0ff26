"""The stages of a build: build the wheel, install it, test it on two ranks."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.files import replacing
from hvdtrain.horovod.build.compiler_wrapper import script
from hvdtrain.horovod.build.log import BuildFailedError, Log
from hvdtrain.horovod.build.plan import BuildPlan, installed_versions
from hvdtrain.horovod.build.recipe import HOROVOD_VERSION, tools, variables
from hvdtrain.horovod.build.stages import Stages
from hvdtrain.horovod.build.toolchain import Toolchain
from hvdtrain.launch.mpirun import mpirun_command

_REQUIREMENT = f"horovod=={HOROVOD_VERSION}"
_MOST_JOBS = 8
_JOB_BYTES = 2 << 30  # memory of the compiler for a file that includes all of torch
_PERCENT = re.compile(r"\[ *(\d+)%\]")
# Packages that the installation must not change.
_KEPT = ("torch", "tensorflow", "keras", "numpy", "mpi4py")


class Workshop:
    """A temporary directory with its own tools, which leave the user's environment untouched."""

    def __init__(self, folder: Path, log: Log, stages: Stages, plan: BuildPlan) -> None:
        self._folder = folder
        self._log = log
        self._stages = stages
        self._plan = plan
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
        with self._stages.stage("preparing build tools"):
            venv = [sys.executable, "-m", "venv", str(self._folder / "tools")]
            self._log.run(venv, self._variables)
            self._show_frameworks()
            if isinstance(self._plan.source, Toolchain):
                self._get_tools(self._plan.source)

    def _show_frameworks(self) -> None:
        """Make the installed packages visible to the tools: Horovod's build imports torch."""
        names = ("site-packages", "dist-packages")
        seen = [path for path in sys.path if os.path.basename(path) in names]
        (own,) = (self._folder / "tools" / "lib").glob("python*/site-packages")
        lines = [f"import site; site.addsitedir({path!r})\n" for path in seen]
        (own / "outside.pth").write_text("".join(lines))

    def _get_tools(self, toolchain: Toolchain) -> None:
        wanted = tools(with_cmake=toolchain.cmake is None)
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
        own = variables(plan.target, wrapper, cmake, _jobs())
        mpi = toolchain.mpicxx.parent
        path = os.pathsep.join([str(mpi), self._variables.get("PATH", "")])
        built = self._folder / "wheel"
        flags = ["--no-build-isolation", "--use-pep517", "--no-deps", "--no-cache-dir", "-v"]
        with self._stages.stage(f"compiling with {_jobs()} processes, some minutes") as detail:
            self._pip(
                ["wheel", *flags, "--no-binary", "horovod", "-w", str(built), _REQUIREMENT],
                {**own, "PATH": path, "MPI_HOME": str(mpi.parent)},
                lambda line: detail(f"{found[1]} %") if (found := _PERCENT.search(line)) else None,
            )
        (wheel,) = built.glob("horovod-*.whl")
        return _keep(wheel, plan.folder)

    def install(self, wheel: Path) -> None:
        """Install the wheel and its dependencies, and nothing else, into this environment."""
        constraints = self._folder / "constraints.txt"
        kept = installed_versions(_KEPT)
        constraints.write_text("".join(f"{name}=={kept[name]}\n" for name in kept))
        here = ["--python", sys.executable, "install", "--constraint", str(constraints)]
        with self._stages.stage("installing"):
            self._pip([*here, "--force-reinstall", "--no-deps", str(wheel)])
            self._pip([*here, _REQUIREMENT])

    def try_on_two_ranks(self) -> None:
        """All-reduce through each framework that Horovod was built for."""
        plan = self._plan
        for name, version in (("torch", plan.target.torch), ("tensorflow", plan.target.tensorflow)):
            if version:
                with self._stages.stage(f"two ranks all-reduce through horovod.{name}"):
                    self._try(name)

    def _try(self, framework: str) -> None:
        line = mpirun_command(
            str(self._plan.mpirun),
            self._plan.mpi.vendor,
            [sys.executable, "-m", "hvdtrain.probes.horovod", framework],
            ranks=2,
            hostfile=None,
            environ=os.environ,
            root=os.geteuid() == 0,
        )
        self._log.run(line.argv, {"OMP_NUM_THREADS": "1", **os.environ, **line.variables})

    def _pip(
        self,
        arguments: list[str],
        own: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        command = [str(self._python), "-m", "pip", *arguments]
        self._log.run(command, {**self._variables, **(own or {})}, on_line)


@contextmanager
def open_workshop(plan: BuildPlan, stages: Stages) -> Iterator[Workshop]:
    """Create a workshop, and remove it at the end in any case; the log stays."""
    with (
        tempfile.TemporaryDirectory(prefix="hvdtrain-horovod-") as folder,
        open(plan.log, "w", encoding="utf-8") as file,
    ):
        yield Workshop(Path(folder), Log(file, plan.log), stages, plan)


def _jobs() -> int:
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(_MOST_JOBS, len(os.sched_getaffinity(0)), free_bytes // _JOB_BYTES))


def _keep(wheel: Path, folder: Path) -> Path:
    """Move a file into the cache atomically, so that no process sees a part of it."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / wheel.name) as copy, open(wheel, "rb") as source:
        shutil.copyfileobj(source, copy)
    return folder / wheel.name
