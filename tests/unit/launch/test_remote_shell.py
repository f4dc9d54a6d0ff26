"""Which hosts ssh is asked about before mpirun is started, and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts.host import Host
from hvdtrain.launch.launchers.request import LaunchRequest
from hvdtrain.launch.remote_shell import require_reachable

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
        request = LaunchRequest(("python",), hosts=hosts)
        require_reachable(request, {**self.environ, **environ})
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


def test_more_than_five(tmp_path: Path) -> None:
    hosts = [Host(f"node{number}", 1) for number in range(7)]
    with pytest.raises(UsageError) as refused:
        Asked(tmp_path, REFUSED).about(*hosts)
    told = "; ".join(f"node{number} (Permission denied (publickey).)" for number in range(5))
    assert str(refused.value) == (
        f"ssh does not reach {told}, and 2 hosts more: correct the hosts, or see to it that `ssh "
        "node0 true` works without a password"
    )


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
