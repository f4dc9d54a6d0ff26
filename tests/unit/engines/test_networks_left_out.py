"""Ranks of one host do not search for networks, unless a user or a site has chosen some."""

from pathlib import Path

import mpi4py
import pytest
from ranks import mpi_python, start

mpi4py.rc.initialize = False  # the module below imports MPI
from hvdtrain.engines.mpi.engine import leave_out_networks  # noqa: E402

LEFT_OUT = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_mtl": "^ofi"}
SIZES = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
HERE = SIZES | {"OPAL_USER_PARAMS_GIVEN": "1"}
RANK = """
import os
from hvdtrain.core import horovod_api as hvd
hvd.init()
print(os.environ.get("OMPI_MCA_mtl"), "libfabric/" in open("/proc/self/maps").read())
"""


@pytest.mark.parametrize(
    ("more", "site", "left_out"),
    [
        ({}, "# btl = self\nbtl_tcp_if_include = lo\n", True),
        *(({}, f"\n {name} = self\n", False) for name in ("btl", "mtl", "pml")),
        ({}, None, False),  # it is elsewhere, and may say what to take
        *(({f"OMPI_MCA_{name}": "ofi"}, "", False) for name in ("btl", "mtl", "pml")),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "", False),
        ({"OPAL_USER_PARAMS_GIVEN": ""}, "", False),
    ],
)
@pytest.mark.parametrize("relocated", [False, True])
def test_what_decides(
    more: dict[str, str], site: str | None, left_out: bool, relocated: bool, tmp_path: Path
) -> None:
    if site is not None:
        (tmp_path / "etc").mkdir()
        (tmp_path / "etc" / "openmpi-mca-params.conf").write_text(site)
    environ = HERE | more | ({"OPAL_PREFIX": str(tmp_path)} if relocated else {})
    found = dict(environ)
    prefix = "/elsewhere" if relocated else tmp_path
    leave_out_networks(f"Open MPI v5.0.11 ({prefix}/lib/libmpi.so.40)", found)
    assert found == (environ | LEFT_OUT if left_out else environ)


@pytest.mark.parametrize(("own", "told"), [(None, "^ofi False"), ("^psm2", "^psm2 True")])
def test_under_mpirun(own: str | None, told: str, tmp_path: Path) -> None:
    python = mpi_python("openmpi")
    if own is not None:
        (tmp_path / ".openmpi").mkdir()
        (tmp_path / ".openmpi" / "mca-params.conf").write_text(f"mtl = {own}\n")
    words = [python.parent / "mpirun", "--oversubscribe", "--bind-to", "none", "-np", 2]
    done = start([*words, python, "-c", RANK], env={"HOME": tmp_path}).end(code=0)
    assert done.stdout.splitlines() == [told] * 2, done
