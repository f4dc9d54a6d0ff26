"""What `run --elastic` hears of its ranks, and the hosts on which it starts them again."""

import os
import random
import socket
import time
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch import supervise as module
from hvdtrain.launch.cluster_environment import free_port, free_ports
from hvdtrain.launch.hosts.host import Host
from hvdtrain.launch.launchers.request import LaunchRequest
from hvdtrain.launch.remote_shell import require_reachable
from hvdtrain.launch.restarts import MilestoneListener, on_hosts
from hvdtrain.launch.supervise import session_folder
from hvdtrain.milestones import CONTINUES, ENDED, SAVED, report
from hvdtrain.world import SUPERVISOR


def heard(listener: MilestoneListener, *milestones: str) -> set[str]:
    """Listen until these are heard, which takes the system a moment; return all that were."""
    found, deadline = listener.heard(), time.monotonic() + 300
    while not found.issuperset(milestones) and time.monotonic() < deadline:
        time.sleep(0.001)
        found |= listener.heard()
    return found


def test_others_are_not_heard() -> None:
    with MilestoneListener(remote=True) as listener:
        _, _, places = listener.address.partition("@")
        report(ENDED, {SUPERVISOR: f"another@{places}"})
        assert listener.heard() == set()


def test_checkpoints_of_a_job_are_known_when_it_is_started_again() -> None:
    with MilestoneListener(remote=False) as listener:
        for milestone, path in ((CONTINUES, ""), (SAVED, "run/a b"), (SAVED, "run/\udcff" * 300)):
            report(f"{milestone} {path}", {SUPERVISOR: listener.address})
            assert heard(listener, milestone) == {milestone}
        listener.renew()
        assert listener.checkpoints == ["", "run/\udcff" * 300]


def test_nobody_listens() -> None:
    with MilestoneListener(remote=False) as listener:
        address = listener.address
    report(ENDED, {SUPERVISOR: address})
    report(ENDED, {})


@pytest.mark.parametrize(
    ("ranks", "per_node", "slots", "expected"),
    [
        *((6, None, [2, 2, 2], 4), (3, None, [2, 2, 2], 3), (6, None, [None, None, None], 4)),
        *((6, 2, [4, 4, 4], 4), (None, None, [2, 2, 2], None)),
    ],
)
def test_as_many_ranks_as_fit(
    ranks: int | None, per_node: int | None, slots: list[int | None], expected: int | None
) -> None:
    hosts = tuple(Host(f"node{n}", count) for n, count in enumerate(slots))
    request = LaunchRequest(("program",), ranks=ranks, per_node=per_node, hosts=hosts)
    left = on_hosts(request, hosts[:2], Path("unused"))
    assert (left.ranks, left.hosts) == (expected, hosts[:2])
    assert on_hosts(request, hosts, Path("unused")).ranks == ranks


def test_a_hostfile_of_the_hosts_that_are_left(tmp_path: Path) -> None:
    hosts = (Host("node0", 2, "me", ("port=22",)), Host("node1"))
    request = LaunchRequest(("program",), hosts=hosts, hostfile="unused")
    left = on_hosts(request, hosts, tmp_path / "left")
    assert left.hostfile is not None
    assert Path(left.hostfile).read_text() == "me@node0 slots=2 port=22\nnode1\n"


def a_server() -> socket.socket:
    """Open a server on a free port, unless another test is faster: then on another one."""
    deadline = time.monotonic() + 300
    while True:
        try:
            return socket.create_server(("127.0.0.1", free_port()))
        except OSError:
            if time.monotonic() > deadline:
                raise


def test_a_port_below_those_of_connections() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = set()
    for _ in range(20):
        random.seed(1)
        ports.add(free_port("127.0.0.1"))
    assert len(ports) > 1
    assert max(ports) < first or first <= 15_000
    with a_server() as server:
        assert free_port("127.0.0.1") != server.getsockname()[1]
    assert len(set(free_ports(200, "127.0.0.1"))) == 200


OPTIONS = "-oBatchMode=yes -oControlMaster=no -oConnectTimeout=10"
REFUSED = "echo 'ssh: Permission denied (publickey).' >&2\nexit 255\n"


class Asked:
    """A folder with an ssh, and what was asked of it."""

    def __init__(self, folder: Path, behaviour: str) -> None:
        self._log = folder / "log"
        self.environ = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder)}
        ssh = folder / "ssh"
        ssh.write_text(f'#!/bin/sh\necho "$@" >> {self._log}\n{behaviour}')
        ssh.chmod(0o755)

    def about(self, *hosts: Host, **environ: str) -> list[str]:
        """Check the hosts, and return the arguments of each call, sorted."""
        require_reachable(LaunchRequest(("python",), hosts=hosts), {**self.environ, **environ})
        return sorted(self._log.read_text().splitlines()) if self._log.exists() else []


def test_what_ssh_is_asked(tmp_path: Path) -> None:
    asked = Asked(tmp_path, "exit 0\n")
    odd = Host("node1", 1, "ann", ("port=2222", "other"))
    assert asked.about(Host("localhost", 1), Host("::1", 1), odd, Host("node2", 1)) == [
        f"{OPTIONS} -- node2 true",
        f"{OPTIONS} -p2222 -- ann@node1 true",
    ]


def test_a_command_that_fails_there_was_reached(tmp_path: Path) -> None:
    assert len(Asked(tmp_path, "exit 1\n").about(Host("node1", 1))) == 1


@pytest.mark.parametrize("name", ["a..b", "x" * 64])
def test_a_name_that_no_dns_can_hold(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ssh does not reach"):
        Asked(tmp_path, REFUSED).about(Host(name, 1))


@pytest.mark.parametrize(
    "name",
    [
        *("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_args", "HYDRA_BOOTSTRAP"),
        *("HYDRA_LAUNCHER_EXTRA_ARGS", "I_MPI_HYDRA_BOOTSTRAP_EXEC", "SLURM_JOB_ID"),
    ],
)
def test_variables_that_choose_another_way(name: str, tmp_path: Path) -> None:
    assert Asked(tmp_path, REFUSED).about(Host("node1", 1), **{name: "x"}) == []


def test_files_that_choose_another_way(tmp_path: Path) -> None:
    asked = Asked(tmp_path, REFUSED)
    file = tmp_path / ".prte" / "mca-params.conf"
    file.parent.mkdir()
    file.write_text("# plm_ssh_agent = rsh\n")
    with pytest.raises(UsageError, match="node1"):
        asked.about(Host("node1", 1))
    file.write_text("plm_ssh_agent = rsh\n")
    before = asked.about(Host("localhost", 1))
    assert asked.about(Host("node1", 1)) == before


BASE = "PRTE_MCA_prte_tmpdir_base"


def test_it_has_an_absolute_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    with session_folder({BASE: "base"}) as session:
        assert Path(session.folder).parent == tmp_path / "base"
    assert list(Path("base").iterdir()) == []


def test_without_a_shell_it_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SHELL", f"{tmp_path}/sh")
    before = set(os.listdir("/proc/self/fd"))
    with (
        pytest.raises(UsageError, match=f"cannot start {tmp_path}/sh, "),
        session_folder({BASE: str(tmp_path)}),
    ):
        pass
    # Meanwhile what others have left may be collected, with its files: there are no more than then.
    assert set(os.listdir("/proc/self/fd")) <= before
    assert list(tmp_path.iterdir()) == []
