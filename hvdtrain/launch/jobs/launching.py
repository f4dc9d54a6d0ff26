"""The line of a job script that starts the ranks."""

from __future__ import annotations

import shlex

from hvdtrain.launch.jobs.request import Request

__all__ = ["launch_line"]


def launch_line(request: Request, hostfile: str = "") -> str:
    """Return the command that starts all ranks, in bash.

    Args:
        request: the job.
        hostfile: for mpirun where the scheduler tells it no hosts, as a word of bash.
    """
    words = {"mpirun": _mpirun, "srun": _srun, "jsrun": _jsrun, "flux": _flux}[request.launcher]
    parts = [shlex.join(words(request))]
    if hostfile:
        if not request.trains:  # a script of one's own leaves its marker there
            parts.append("-x OUT")
        parts.append(f"-hostfile {hostfile}")
    if request.launcher == "mpirun":
        parts.append("--")
    parts.append(shlex.join(request.arguments))
    if request.trains:
        parts.append('--out "$OUT" --resume auto')
    return " ".join(parts)


def _program(request: Request) -> list[str]:
    return [request.python, "-m", "hvdtrain"]


def _mpirun(request: Request) -> list[str]:
    # It finds the mpirun of the MPI that is loaded, and builds its command line.
    return [*_program(request), "run", "-np", str(request.ranks)]


def _srun(request: Request) -> list[str]:
    # One rank that fails must end all. Every rank sees all GPUs of its node and takes its own:
    # behind masks, GPUs cannot reach each other's memory.
    gpus = ["--gpu-bind=none"] if request.gpus_per_node else []
    mpi = [f"--mpi={request.mpi}"] if request.mpi else []
    cpus = f"--cpus-per-task={request.cpus_per_rank}"
    return ["srun", *mpi, "--kill-on-bad-exit=1", cpus, *gpus, *_program(request)]


def _jsrun(request: Request) -> list[str]:
    each = {
        "-n": request.ranks,
        "-r": request.ranks_per_node,
        "-a": 1,
        "-g": request.gpus_per_node // request.ranks_per_node,
        "-c": request.cpus_per_rank,
        "-b": "rs",
        "-d": "packed",
    }
    return ["jsrun", *(str(word) for pair in each.items() for word in pair), *_program(request)]


def _flux(request: Request) -> list[str]:
    sizes = [f"-N{request.nodes}", f"-n{request.ranks}", f"-c{request.cpus_per_rank}"]
    if gpus := request.gpus_per_node // request.ranks_per_node:
        sizes += [f"-g{gpus}", "-o", "gpu-affinity=per-task"]
    return ["flux", "run", *sizes, *_program(request)]
