"""Starts the ranks of a benchmark and reads their measurements."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.launchers.choice import mpirun_command
from hvdtrain.launch.launchers.mpi_library import MpiLibrary, find_mpirun, loaded_library
from hvdtrain_bench.harness.results import Result, read_result
from hvdtrain_bench.harness.settings import Settings

_GRACE_SECONDS = 10.0
# No job takes this long, even on a slow machine, unless it hangs.
_LIMIT_SECONDS = 2 * 3600.0


@dataclass(frozen=True)
class RankLauncher:
    """Starts ranks.

    Attributes:
        hostfile: hosts of the ranks; None for this host.
    """

    library: MpiLibrary
    mpirun: Path
    hostfile: str | None
    threads: int

    @classmethod
    def find(cls, hostfile: str | None, threads: int) -> RankLauncher:
        """Find the installed MPI and its mpirun."""
        library = loaded_library()
        return cls(library, find_mpirun(library), hostfile, threads)


def run_job(
    launcher: RankLauncher, kind: str, ranks: int, settings: Settings, folder: Path
) -> Result:
    """Run one benchmark and return the result that rank 0 wrote."""
    file = (folder / f"{kind}-{ranks}.part").resolve()
    environ = {**os.environ, "OMP_NUM_THREADS": str(launcher.threads)}
    worker = [sys.executable, "-m", "hvdtrain_bench.worker"]
    line = mpirun_command(
        str(launcher.mpirun),
        launcher.library.vendor,
        [*worker, kind, settings.to_json(), str(launcher.threads), str(file)],
        ranks=ranks,
        hostfile=launcher.hostfile,
        environ=environ,
    )
    try:
        code = _run(line.argv, {**environ, **line.variables})
        if code != 0 or not file.exists():
            raise HvdtrainError(
                f"bench {kind}: {ranks} ranks ended with exit code {code}; their messages say why"
            )
        return read_result(file)
    finally:
        file.unlink(missing_ok=True)


def _run(argv: tuple[str, ...], environ: dict[str, str]) -> int:
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=environ)
    try:
        return process.wait(_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        raise HvdtrainError(f"the ranks did not end within {_LIMIT_SECONDS:.0f} s") from None
    finally:
        if process.poll() is None:
            process.terminate()  # mpirun ends its ranks
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
