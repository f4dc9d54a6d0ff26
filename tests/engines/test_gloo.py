"""What the gloo engine promises beyond the contract, on real ranks."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import launch, start
from shared_launch import SharedLaunch, results_of

from hvdtrain.launch.cluster_environment import free_port

WORKER = Path(__file__).with_name("gloo_worker.py")
LOOPBACK = "0100007F"
# Two networks that only a pair of virtual interfaces joins; the first has an address more.
TWO_NETWORKS = """
set -e
unshare --net sleep infinity & other=$!
trap 'kill $other' EXIT
own=$(readlink /proc/$$/ns/net)
until its=$(readlink /proc/$other/ns/net) && [[ $its != "$own" ]]; do sleep 0.01; done
ip link set lo up
nsenter --target $other --net ip link set lo up
ip link add dummy0 type veth peer name dummy1
ip address add 10.77.0.1/24 dev dummy0
ip link set dummy0 up
ip link add here type veth peer name there netns $other
ip address add 10.78.0.1/24 dev here
nsenter --target $other --net ip address add 10.78.0.2/24 dev there
ip link set here up
nsenter --target $other --net ip link set there up
export WORLD_SIZE=2 MASTER_ADDR=10.78.0.1 MASTER_PORT=29500
RANK=1 nsenter --target $other --net "$@" & rank1=$!
RANK=0 "$@"
wait $rank1
"""
# The last one breaks the connection.
TWO_RANKS = SharedLaunch(WORKER, 2, ["sockets", "again", "automatic", "gone_rank"], warm="torch")


def test_ranks_of_one_host_listen_on_loopback_only() -> None:
    addresses = TWO_RANKS.results("sockets")
    assert addresses == [[LOOPBACK, LOOPBACK], [LOOPBACK]]  # rank 0 has the store, too


def test_a_rank_that_has_gone_is_an_error_of_the_others() -> None:
    failures = TWO_RANKS.results("gone_rank")[0]
    assert [text.split(":")[0] for text in failures] == [
        "[rank 0/2] agreement",
        "[rank 0/2] allreduce",
    ]
    assert all("the connection to another rank failed" in text for text in failures)


def test_a_world_is_left_and_joined_again() -> None:
    assert TWO_RANKS.results("again") == [[0, 0], [0, 0]]


def test_auto_takes_nccl_where_every_rank_has_a_gpu() -> None:
    assert (
        TWO_RANKS.results("automatic")
        == [
            [
                ["gloo", "each rank has a GPU of its own"],
                ["mpi", "not nccl: rank 1 on here sees no GPU"],
                ["mpi", ""],
            ]
        ]
        * 2
    )


def test_two_jobs_at_once_do_not_meet() -> None:
    how: dict[str, Any] = {"args": ["again"], "warm": "torch"}
    with launch(WORKER, 2, **how) as one, launch(WORKER, 2, **how) as other:
        for job in (one, other):
            done = job.wait()
            if done.returncode != 0:
                job.fail(f"exit code {done.returncode}")
            assert results_of(job, 2, 0) == [[0, 0], [0, 0]]


def test_without_a_launcher_it_is_a_world_of_one() -> None:
    with start([sys.executable, WORKER, "network"]) as job:
        assert job.wait().returncode == 0, job.stderr
        assert results_of(job, 1, 0) == [[1, 1]]


def test_ranks_find_the_network_that_joins_them() -> None:
    isolated = ["unshare", "--user", "--map-root-user", "--net"]
    try:
        subprocess.run([*isolated, "ip", "link"], check=True, capture_output=True, timeout=600)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    with start(
        [*isolated, "bash", "-c", TWO_NETWORKS, "bash", sys.executable, WORKER, "network"]
    ) as job:
        done = job.wait()
        if done.returncode != 0:
            job.fail(f"exit code {done.returncode}")
        assert results_of(job, 2, 0) == [[2, 2]] * 2


def test_an_interface_that_is_not_there() -> None:
    code = "from hvdtrain.core import context; context.init('gloo')"
    done = launch(["-c", code], 2, env={"GLOO_SOCKET_IFNAME": "nope"}).end(code=2)
    assert "hvdtrain: rank 0 has no address to listen on (GLOO_SOCKET_IFNAME=nope)" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_others_write_into_the_store_is_not_run(tmp_path: Path) -> None:
    """Whoever reaches the port may write there, and a pickle would be a program."""
    port = free_port("127.0.0.1")
    env = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    code = "from hvdtrain.core import context; context.init('gloo')"
    stranger = f"""
import os, pickle, torch.distributed as dist
class Program:
    def __reduce__(self):
        return os.mkdir, ({str(tmp_path / "run")!r},)
store = dist.TCPStore("127.0.0.1", {port}, 2, False)
store.set("hvdtrain/1/1/1", pickle.dumps(Program()))
"""
    with start([sys.executable, "-c", code], env=env) as rank:
        subprocess.run([sys.executable, "-c", stranger], check=True, timeout=300)
        done = rank.wait()
    assert not list(tmp_path.iterdir())
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("hvdtrain: [rank 0/2] the ranks could not connect to each other (")
