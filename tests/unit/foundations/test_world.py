"""What launchers' variables promise, from environments as launchers leave them."""

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.world import PromisedWorld, idle_tasks, promised_world, under_launcher


def env(text: str) -> dict[str, str]:
    return dict(word.split("=") for word in text.split())


OPEN_MPI = env(
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1 OMPI_UNIVERSE_SIZE=8 "
    "PMIX_NAMESPACE=prterun-host-5@1 PMIX_RANK=3"
)
BATCH = env(
    "SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_NPROCS=8 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 "
    "SLURM_TASKS_PER_NODE=4(x2)"
)
MVAPICH2 = env("MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_LOCAL_RANK=1")
JSRUN = {"JSM_NAMESPACE_RANK": "5", "JSM_NAMESPACE_SIZE": "12", "JSM_NAMESPACE_LOCAL_RANK": "5"}
PALS = {"PALS_RANKID": "2", "PALS_NODEID": "0", "PMI_RANK": "2", "PMI_SIZE": "4"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "promised"),
    [
        (MVAPICH2, PromisedWorld("MVAPICH2's mpirun", 1, 2, "MV2_COMM_WORLD_SIZE")),
        (JSRUN, PromisedWorld("jsrun", 5, 12, "JSM_NAMESPACE_SIZE")),
        (PALS, PromisedWorld("PALS mpiexec", 2, 4, "PMI_SIZE")),
        (BY_HAND, PromisedWorld("torchrun", 1, 2, "WORLD_SIZE")),
        # Where variables that somebody has set by hand are left over.
        (OPEN_MPI | BY_HAND, PromisedWorld("Open MPI's mpirun", 3, 8, "OMPI_COMM_WORLD_SIZE")),
        (env("OMPI_COMM_WORLD_RANK=0"), None),
        (env("OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=2"), None),
        (env("PMI_RANK=-1 PMI_SIZE=many"), None),
        ({}, None),
    ],
)
def test_promise(environ: dict[str, str], promised: PromisedWorld | None) -> None:
    assert promised_world(environ) == promised
    assert under_launcher(environ) == (promised is not None)


# Those of MVAPICH2, jsrun and PALS, above, are after their documentation.
RECORDED = json.loads(Path(__file__).with_name("launcher_environments.json").read_text())


@pytest.mark.parametrize("record", RECORDED, ids=lambda record: record["launcher"])
def test_recorded_environments(record: dict[str, Any]) -> None:
    """What is about ranks in the environment of one of them, or of a shell that is none."""
    promised = promised_world(record["environ"])
    found = None if promised is None else list(astuple(promised))
    assert found == record["promised"]
    assert idle_tasks(record["environ"]) == record["idle_tasks"]


def test_no_tasks_are_idle_where_none_were_asked_for() -> None:
    assert idle_tasks({"SLURM_JOB_ID": "7"}) == 0
    assert idle_tasks({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}) == 0
    interactive = {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert idle_tasks(BATCH | interactive) == 0


def test_launchers_that_tell_no_size() -> None:
    """srun with PMIx, mpiexec -pmi-port, PALS (github.com/meta-pytorch/torchcomms/pull/79)."""
    pals = "PALS_RANKID=0 PALS_LOCAL_RANKID=0 PALS_LOCAL_SIZE=4 PALS_NODEID=0"
    for text in ("PMIX_NAMESPACE=slurm.pmix.7.0 PMIX_RANK=1", "PMI_PORT=h:4 PMI_ID=1", pals):
        environ = env(text)
        assert promised_world(environ) is None
        assert under_launcher(environ)
