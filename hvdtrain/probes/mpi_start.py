"""Initialize MPI on one rank, and print its thread level and which GPU memory it takes."""

from __future__ import annotations

import ctypes
import json

from mpi4py import MPI

from hvdtrain.engines.mpi.gpu_support import gpu_kinds


def main() -> None:
    """Print the thread level, and the kinds of GPU memory that this MPI takes."""
    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    gpu_memory = gpu_kinds(ctypes.CDLL(MPI.__file__))
    print(json.dumps({"threads": levels[MPI.Query_thread()], "gpu_memory": gpu_memory}))


if __name__ == "__main__":
    main()
