"""The hostfile templates, by launching with them: two host names on this machine, without ssh."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts import AGENT_VARIABLES, require_hosts
from job import Completed
from mpis import MPICH, OPEN_MPI_4
from ranks import mpi_python, run_ranks, start

from hvdtrain.cli.main import main
from hvdtrain.launch.hosts.formats import FORMATS
from hvdtrain.launch.hosts.host import Host, HostfileError, HostText, with_slots

REPOSITORY = Path(__file__).resolve().parents[2]
HOSTFILES = REPOSITORY / "hostfiles"
WORKER = Path(__file__).with_name("topology_worker.py")
MPIS = ("openmpi", OPEN_MPI_4, MPICH)
# The templates are named for grammars.
GRAMMARS = {"openmpi": "openmpi", "openmpi4": "openmpi", "mpich": "mpich"}

HostsOf = Callable[..., tuple[str, str]]
LIBRARIES = {"openmpi": "Open MPI v5", "openmpi4": "Open MPI v4", "mpich": "MPICH"}


@pytest.mark.parametrize("mpi", MPIS)
def test_two_nodes_through_run(mpi: str, tmp_path: Path) -> None:
    """`run` without -np takes every slot, and hands HVDTRAIN_* to hosts behind a remote shell."""
    require_hosts()
    hostfile = two_nodes(mpi, tmp_path)
    line = [mpi_python(mpi), "-m", "hvdtrain", "run", "-hostfile", hostfile, "--", WORKER]
    with start(line, env={**AGENT_VARIABLES[mpi], "HVDTRAIN_BUCKET_BYTES": 4096}) as job:
        done = job.ended(code=0)
        results = job.results(4)
    done = Completed(0, done.stdout, done.stderr, done.seconds, results)
    assert_two_nodes(done, mpi)
    assert [result["bucket_bytes"] for result in results] == [4096] * 4


@pytest.mark.parametrize("mpi", MPIS)
def test_localhost(mpi: str) -> None:
    done = run_ranks(WORKER, 8, mpi=mpi, hostfile=HOSTFILES / f"localhost.{GRAMMARS[mpi]}")
    assert [r["local_rank"] for r in done.results] == list(range(8))
    assert {r["local_size"] for r in done.results} == {8}
    assert {r["cross_size"] for r in done.results} == {1}
    assert [r["promised"] for r in done.results] == [[rank, 8] for rank in range(8)]


@pytest.mark.parametrize("form", FORMATS)
def test_the_template_is_what_the_writer_writes(form: str) -> None:
    """And it names the hosts of the templates for Open MPI and MPICH, which are launched."""
    text = (HOSTFILES / f"two-nodes.{form}").read_text()
    bare = re.sub(r" *#.*", "", text).lstrip("\n")
    assert bare == FORMATS[form].write([Host("name_of_node1", 2), Host("name_of_node2", 2)])
    named = text.replace("name_of_", "")
    hosts = with_slots(FORMATS[form].read(HostText("hosts", named)), 2, "hosts")
    assert hosts == [Host("node1", 2), Host("node2", 2)]
    with pytest.raises(HostfileError, match="is a placeholder"):
        FORMATS[form].read(HostText("hosts", text))


def test_every_template_is_tested() -> None:
    templates = {path.name for path in HOSTFILES.iterdir()} - {"README.md"}
    two_nodes = {f"two-nodes.{form}" for form in FORMATS}
    assert templates == {f"localhost.{name}" for name in GRAMMARS.values()} | two_nodes


def two_nodes(mpi: str, folder: Path) -> Path:
    text = (HOSTFILES / f"two-nodes.{GRAMMARS[mpi]}").read_text()
    named = text.replace("name_of_node1", "nodea").replace("name_of_node2", "nodeb")
    path = folder / "hosts"
    path.write_text(named)
    return path


def assert_two_nodes(done: Completed, mpi: str) -> None:
    hosts = ["nodea", "nodea", "nodeb", "nodeb"]
    for rank, result in enumerate(done.results):
        assert (result["rank"], result["size"]) == (rank, 4)
        assert result["promised"] == [rank, 4]
        assert (result["local_rank"], result["local_size"]) == (rank % 2, 2)
        assert (result["cross_rank"], result["cross_size"]) == (rank // 2, 2)
        assert result["hostnames"] == hosts
        assert result["heard"] == [[other, host] for other, host in enumerate(hosts)]
        assert result["library"].startswith(LIBRARIES[mpi])


@pytest.fixture
def hosts_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> HostsOf:
    monkeypatch.chdir(tmp_path)

    def of(text: str, *words: str, code: int) -> tuple[str, str]:
        Path("hosts").write_text(text)
        with pytest.raises(SystemExit) as end:
            main(["hosts", "--from", "hosts", *words])
        assert (end.value.code or 0) == code
        told, complained = capsys.readouterr()
        return told, complained

    return of


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("a slots=2\nb slots=2\n", ["-np", "4"], "hosts: 2 hosts, 4 slots"),
        ("a slots=2\nb slots=2\n", ["-np", "5"], "5 ranks need more than the 4 slots of a 2, b 2"),
        ("a slots=2\na.x slots=2\n", [], "a and a.x: one host under two names"),
        ("a\nb slots=2\n", [], "hosts: a: no slots=: Open MPI takes as many as the host has cores"),
        ("a\nb slots=2\n", ["--slots", "3"], "hosts: 2 hosts, 5 slots"),
        ("# none\n", [], "hosts: names no host: write one host per line"),
    ],
)
def test_hosts_are_checked(text: str, words: list[str], message: str, hosts_of: HostsOf) -> None:
    right = message.endswith("slots")
    told, complained = hosts_of(text, "--check", *words, code=0 if right else 2)
    assert message in (told if right else complained)
    assert (told + complained).count("\n") == 1


@pytest.mark.parametrize(
    ("text", "to", "written", "said"),
    [
        ("me@a slots=2 port=22\n", "pbs", "a\na\n", "not written for pbs: me@a, port=22 of a"),
        ("me@a slots=1\n", "mpich", "a:1 user=me\n", ""),
        ("me@a max_slots=8\na\n", "openmpi", "me@a slots=2\n", "for openmpi: max_slots=8 of a"),
        ("a:1 binding=rr\n", "mpich", "a:1\n", "not written for mpich: binding=rr of a"),
        ("a\n", "mpich", "", "hosts: 'a': has no number of slots: pass --slots N"),
        ("fe80::1 slots=1\n", "slurm", "", "slurm: 'fe80::1': an IPv6 address cannot stand here"),
    ],
)
def test_what_a_conversion_loses_is_said(
    text: str, to: str, written: str, said: str, hosts_of: HostsOf
) -> None:
    told, complained = hosts_of(text, "--to", to, code=0 if written else 2)
    assert told == written
    assert said in complained
    assert complained.count("\n") == bool(said)
