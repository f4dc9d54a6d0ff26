"""Hostfiles that are refused before a launcher sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch.hostfile import require_grammar, require_hostfile


@pytest.mark.parametrize("text", ["node1 slots=4\n", "# both\nnode1:2 \n\nnode2:2"])
def test_accepted(tmp_path: Path, text: str) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(text)
    require_hostfile(str(hosts))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "names no host"),
        (b"# node1 slots=4\n\n   \n", "names no host"),
        (b"# a\nnode1\nname_of_node2 slots=2\n", "hosts:3: name_of_node2 is a placeholder"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_bytes(content)
    with pytest.raises(UsageError, match=reason) as caught:
        require_hostfile(str(hosts))
    assert "\n" not in str(caught.value)


def test_a_placeholder_in_a_comment_is_none(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("node1 # once name_of_node1\n")
    require_hostfile(str(hosts))


def test_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a file"):
        require_hostfile(str(tmp_path))
    with pytest.raises(UsageError, match="does not exist"):
        require_hostfile(str(tmp_path / "hosts"))


@pytest.mark.parametrize(
    ("vendor", "text", "reason"),
    [
        ("openmpi", "node1:2", "takes node1:2 for a host's name: write 'node1 slots=2'"),
        ("openmpi", "node1 slots=two", "slots=two must be a number, at least 1"),
        ("openmpi", "node1 slots=0", "slots=0 must be a number"),
        ("openmpi", "node1 slots = # none", "slots= must be a number"),
        ("mpich", "node1 slots=2", "slots= is Open MPI's form: write 'node1:2'"),
        ("intelmpi", "node1:2 # two", "only in a line of its own"),
    ],
)
def test_the_grammar_of_another_mpi(tmp_path: Path, vendor: str, text: str, reason: str) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(f"# slots=x and a:1\n{text}\n")
    with pytest.raises(UsageError, match=f"hosts:2: .*{reason}"):
        require_grammar(str(hosts), vendor)


@pytest.mark.parametrize(
    ("vendor", "text"),
    [
        ("openmpi", "# node1:2\nnode1 slots=2 max_slots=4 # two\nfe80::1\nme@node2 slots = 1"),
        ("mpich", "# slots=2\nnode1:2\nnode2 binding=user:0"),
    ],
)
def test_the_grammar_of_this_mpi(tmp_path: Path, vendor: str, text: str) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(text)
    require_grammar(str(hosts), vendor)
