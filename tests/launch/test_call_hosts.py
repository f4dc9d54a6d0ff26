"""`hvdtrain.run` on several hosts: stand-in hosts on this machine, without ssh."""

import os
import socket
import time
from pathlib import Path

import pytest
from called import BoomError
from hosts import AGENT, require_hosts, write_hostfile

import hvdtrain
from hvdtrain.errors import UsageError
from hvdtrain.launch.calls.called_rank import Arrival, RankAnswer, connected
from hvdtrain.launch.calls.rank_server import Arrived, RankServer, places

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    require_hosts()
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", str(AGENT))


@pytest.mark.usefixtures("two_hosts")
def test_ranks_of_two_hosts_meet() -> None:
    def trains() -> tuple[str, list[str], float]:
        import torch
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the names of stand-in hosts lead nowhere
        dist.init_process_group("gloo")
        total = torch.tensor(dist.get_rank() + 1.0)
        dist.all_reduce(total)
        dist.barrier()
        dist.destroy_process_group()
        return socket.gethostname(), [os.environ[name] for name in NAMES], float(total)

    assert hvdtrain.run(trains, hosts="nodea:2,nodeb:1") == [
        ("nodea", ["0", "3", "0", "2", "0"], 6.0),
        ("nodea", ["1", "3", "1", "2", "0"], 6.0),
        ("nodeb", ["2", "3", "0", "1", "1"], 6.0),
    ]


@pytest.mark.usefixtures("two_hosts")
def test_an_exception_on_another_host(tmp_path: Path) -> None:
    def fails() -> None:
        import hvdtrain.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise BoomError(7, socket.gethostname())
        hvd.barrier()  # in which the other waits for it

    hostfile = write_hostfile(tmp_path / "hosts", "openmpi", [1, 1])
    with pytest.raises(BoomError) as caught:
        hvdtrain.run(fails, hostfile=hostfile)
    assert caught.value.args == (7, "node1")
    assert caught.value.__notes__[0].startswith("on rank 1 of 2:\nTraceback")


def test_the_address_of_the_first_rank() -> None:
    """It is one over which two hosts have connected, and the loopback where all are on one."""
    here = Arrived(Arrival(0, "a", 70), reached="172.17.0.1", origin="172.17.0.1")
    there = Arrived(Arrival(1, "b", 71), reached="10.0.0.1", origin="10.0.0.2")
    also = Arrived(Arrival(2, "b", 72), reached="10.0.0.1", origin="10.0.0.2")

    def stores(arrived: list[Arrived], caller: str) -> set[tuple[str, ...]]:
        return {place.addresses for place in places(arrived, caller)}

    assert stores([here, there, also], "a") == {("10.0.0.1:70",)}
    assert stores([here, there, also], "c") == {("172.17.0.1:70",)}
    assert stores([there, also], "a") == {("127.0.0.1:71",)}
    assert stores([Arrived(Arrival(0, "a", 70))], "a") == {("127.0.0.1:70",)}
    found = [(p.rank, p.local_rank, p.local_size, p.node) for p in places([here, there, also], "a")]
    assert found == [(0, 0, 1, 0), (1, 0, 2, 1), (2, 1, 2, 1)]


def test_bad_hosts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="both name hosts"):
        hvdtrain.run(print, hosts="a:1", hostfile=tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        hvdtrain.run(print, hostfile=tmp_path / "none")
    with pytest.raises(UsageError, match="3 ranks need more than the 2 slots"):
        hvdtrain.run(print, np=3, hosts="a:1,b:1")
    (tmp_path / "hosts").write_text("a\n")
    with pytest.raises(UsageError, match="also pass np="):
        hvdtrain.run(print, hostfile=tmp_path / "hosts")


def test_strangers_that_connect_are_ignored() -> None:
    """One says nothing, one speaks another language, and one has another key."""
    key = b"k" * 32
    listening = socket.create_server(("127.0.0.1", 0))
    place = listening.getsockname()
    address = f"127.0.0.1:1,{place[0]}:{place[1]}"  # nobody is at the first of them
    with (
        RankServer(listening, key, b"call", 1) as server,
        socket.create_connection(place),
        socket.create_connection(place) as rude,
    ):
        rude.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with pytest.raises(ConnectionError, match="cannot reach the process that called"):
            connected(f"{place[0]}:{place[1]}", b"x" * 32)
        with connected(address, key) as rank:
            rank.send(Arrival(0, "node", 70))
            found, call = rank.recv()
            assert (found.rank, found.size, found.addresses) == (0, 1, ("127.0.0.1:70",))
            assert call == b"call"
            rank.send(RankAnswer(0, b"result"))
            while not server.answers:
                time.sleep(0.01)
    assert server.answers == [RankAnswer(0, b"result")]
