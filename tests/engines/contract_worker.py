"""Runs the contract's table on each rank.

Arguments: cases of it, one after the other in one job: an engine, and then settings, as
"mpi" or "mpi CHUNK_BYTES=1000 SHARED_MEMORY=0".
"""

import os
import sys
from collections.abc import Callable, Mapping

from contract_cases import all_cases
from contract_device import on_device
from shared_launch import run_each

from hvdtrain.config import Config
from hvdtrain.engines import open_world
from hvdtrain.engines.communicator import Communicator
from hvdtrain.world import promised_world


class _Cases(dict[str, Callable[[], object]]):
    def __missing__(self, case: str) -> Callable[[], object]:
        return lambda: _run(case)


def _run(case: str) -> dict[str, int]:
    engine, *settings = case.split()
    communicator = _open(engine, dict(f"HVDTRAIN_{word}".split("=") for word in settings))
    taken, refused = _run_table(communicator)
    communicator.barrier()
    return {"taken": taken, "refused": refused, "size": communicator.size}


def _open(name: str, settings: Mapping[str, str]) -> Communicator:
    engine = name
    # Environments of other engines have no torch.
    if engine == "hidden":
        from hidden_engine import make_known

        make_known()
    elif engine == "mpi-hidden":
        from hidden_mpi import let_mpi_take_the_device

        let_mpi_take_the_device()
        engine = "mpi"
    elif engine == "nccl":
        _share_gpus()
    environ = {**os.environ, **settings}
    communicator = open_world(engine, Config.from_environ(environ), environ).communicator
    if name in DEVICES:
        return on_device(communicator, DEVICES[name])
    return communicator


def _share_gpus() -> None:
    """Have NCCL take ranks for ranks of as many hosts, where there are fewer GPUs than ranks."""
    import torch

    promised = promised_world(os.environ)
    if promised is not None and promised.size > torch.cuda.device_count():
        os.environ["NCCL_HOSTID"] = f"rank {promised.rank}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"


def _run_table(communicator: Communicator) -> tuple[int, int]:
    taken, refused = 0, 0
    for case in all_cases():
        if case.objection(communicator) is not None:
            refused += 1
            continue
        for _ in range(2):
            try:
                case.run(communicator)
            except AssertionError as error:
                text = f"rank {communicator.rank} of {communicator.size}, {case.title}: {error}"
                print(text, file=sys.stderr, flush=True)
                communicator.abort(1)
        taken += 1
    return taken, refused


# Where an engine's table has its operands, if not in host memory.
DEVICES = {"nccl": "cuda", "hidden": "hidden", "mpi-hidden": "hidden"}


if __name__ == "__main__":
    run_each(_Cases(), sys.argv[1:])
