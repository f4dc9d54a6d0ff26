"""hvdtrain.torch at 1 to 4 ranks: operations, SyncBatchNorm and DistributedOptimizer."""

import sys
from pathlib import Path

import pytest
from horovod_environment import horovod_python
from hosts import AGENT_ARGS, require_hosts, write_hostfile
from ranks import start
from shared_launch import SharedLaunch

WORKER = Path(__file__).with_name("torch_worker.py")
DOCS = Path(__file__).resolve().parents[3] / "docs"
# Many buckets, some of them with several parameters.
SMALL = "BUCKET_BYTES=600, FIRST_BUCKET_BYTES=100"
TABLES = ["operations", "asynchronous", "batch norm", "optimizers"]
# Each table and each engine meets each number of ranks and each way once, not in all pairs.
LAUNCHES = {
    np: SharedLaunch(WORKER, np, jobs, warm="torch")
    for np, jobs in {
        1: TABLES,
        2: [
            *(*TABLES[:-1], f"optimizers in place, {SMALL}", "table of two"),
            *(f"exchanges, ENGINE=gloo, {SMALL}", f"sharded, SHARED_MEMORY=0, {SMALL}"),
        ],
        3: [*TABLES, "table of three"],
    }.items()
}
AT_THREE = [
    *(f"optimizers in place, {SMALL}", "operations, ENGINE=gloo"),
    f"sharded, ENGINE=gloo, {SMALL}",
]
MORE_AT_THREE = SharedLaunch(WORKER, 3, AT_THREE, warm="torch")
# Only sums know four ranks as another case, a tree of two levels, which tests/engines has, too.
AT_FOUR = [*TABLES, f"sharded, SHARED_MEMORY=0, {SMALL}"]
ALL_AT_FOUR = SharedLaunch(WORKER, 4, AT_FOUR, warm="torch")


@pytest.mark.parametrize(
    ("np", "job"), [(np, job) for np, launched in LAUNCHES.items() for job in launched.cases]
)
def test_on_one_node(np: int, job: str) -> None:
    results = LAUNCHES[np].results(job)
    assert [result["place"] for result in results] == [[rank, np, 0] for rank in range(np)]
    assert all(result["reduces in a thread"] for result in results) or "optimizers" not in job


def test_the_page_says_what_goes_with_each_exchange() -> None:
    found: dict[str, dict[str, str]] = {}
    for np, job in ((2, "table of two"), (3, "table of three")):
        tables = [result["found"] for result in LAUNCHES[np].results(job)]
        assert all(table == tables[0] for table in tables)
        found |= tables[0]
    assert table_of_page() == found


def table_of_page() -> dict[str, dict[str, str]]:
    lines = (DOCS / "exchanges.md").read_text().splitlines()
    start = lines.index("<!-- checked by tests/frameworks/torch/test_torch.py -->") + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    (_, *exchanges), _, *features = rows
    return {title: dict(zip(exchanges, cells, strict=True)) for title, *cells in features}


@pytest.mark.soak
@pytest.mark.parametrize("job", MORE_AT_THREE.cases)
def test_three_ranks(job: str) -> None:
    places = [result["place"] for result in MORE_AT_THREE.results(job)]
    assert places == [[rank, 3, 0] for rank in range(3)]


@pytest.mark.soak
@pytest.mark.parametrize("job", ALL_AT_FOUR.cases)
def test_four_ranks(job: str) -> None:
    places = [result["place"] for result in ALL_AT_FOUR.results(job)]
    assert places == [[rank, 4, 0] for rank in range(4)]


@pytest.mark.soak
def test_an_mpi_without_threads() -> None:
    env = {"MPI4PY_RC_THREAD_LEVEL": "single", "HVDTRAIN_BUCKET_BYTES": 600}
    results = SharedLaunch(WORKER, 2, ["optimizers"], env=env, warm="torch").results("optimizers")
    assert [result["reduces in a thread"] for result in results] == [False, False]


@pytest.mark.parametrize("slots", [(2, 1), pytest.param((2, 2), marks=pytest.mark.soak)])
def test_two_nodes(slots: tuple[int, int], tmp_path: Path) -> None:
    require_hosts()
    jobs = [f"exchanges, {SMALL}", f"sharded, {SMALL}"]
    nodes = [node for node, count in enumerate(slots) for _ in range(count)]
    launched = SharedLaunch(
        WORKER,
        len(nodes),
        jobs,
        hostfile=write_hostfile(tmp_path / "hosts", "openmpi", slots),
        launcher_args=AGENT_ARGS["openmpi"],
    )
    for job in jobs:
        places = [result["place"] for result in launched.results(job)]
        assert places == [[rank, len(nodes), node] for rank, node in enumerate(nodes)]


@pytest.mark.horovod
def test_operations_on_horovod() -> None:
    env = {"HVDTRAIN_ENGINE": "horovod"}
    launched = SharedLaunch(WORKER, 2, ["operations"], python=horovod_python(), env=env)
    places = [result["place"] for result in launched.results("operations")]
    assert places == [[0, 2, 0], [1, 2, 0]]
    assert launched.stderr == ""


def test_without_a_launcher() -> None:
    code = (
        "import hvdtrain.torch as hvd, torch; hvd.init();"
        "print(hvd.rank(), hvd.size(), hvd.allreduce(torch.tensor([2.0])).item())"
    )
    done = start([sys.executable, "-c", code]).end()
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 1 2.0\n", "")


def test_before_init() -> None:
    done = start([sys.executable, "-c", "import hvdtrain.torch as hvd; hvd.rank()"]).end(code=1)
    assert "NotInitializedError: hvdtrain is not initialized: call init() first" in done.stderr
