"""What `run --elastic` hears of its ranks, and the hosts on which it starts them again."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hvdtrain.launch.hosts.host import Host
from hvdtrain.launch.launchers.request import LaunchRequest
from hvdtrain.launch.restarts import MilestoneListener, on_hosts
from hvdtrain.milestones import (
    BEGAN,
    ENDED,
    INITIALIZED,
    LOST,
    STARTED,
    SUPERVISOR,
    begin,
    finish_init,
    report,
)


def heard(listener: MilestoneListener, *milestones: str) -> set[str]:
    """Listen until these are heard, which takes the system a moment; return all that were."""
    found, deadline = listener.heard(), time.monotonic() + 300
    while not found.issuperset(milestones) and time.monotonic() < deadline:
        time.sleep(0.001)
        found |= listener.heard()
    return found


def test_milestones_are_heard_once() -> None:
    with MilestoneListener(remote=False) as listener:
        environ = {SUPERVISOR: listener.address}
        assert listener.heard() == set()
        report(STARTED, environ)
        report(ENDED, environ)
        assert heard(listener, STARTED, ENDED) == {STARTED, ENDED}
        assert listener.heard() == set()


def test_a_rank_that_ends_before_it_joins_is_lost() -> None:
    with MilestoneListener(remote=True) as listener:
        first, second = ({SUPERVISOR: listener.address} for _ in range(2))
        for environ in (first, second):
            begin(environ)
            assert heard(listener, BEGAN) == {BEGAN}
        finish_init(first)
        assert heard(listener, INITIALIZED) == {INITIALIZED}
        assert listener.heard() == set()
        os.close(int(second["HVDTRAIN_SUPERVISOR_FD"]))
        assert heard(listener, LOST) == {LOST}


def test_others_are_not_heard() -> None:
    with MilestoneListener(remote=True) as listener:
        _, _, places = listener.address.partition("@")
        report(ENDED, {SUPERVISOR: f"another@{places}"})
        assert listener.heard() == set()


def test_nobody_listens() -> None:
    with MilestoneListener(remote=False) as listener:
        address = listener.address
    report(ENDED, {SUPERVISOR: address})
    report(ENDED, {})


@pytest.mark.parametrize(
    ("ranks", "per_node", "slots", "expected"),
    [
        (6, None, [2, 2, 2], 4),
        (3, None, [2, 2, 2], 3),
        (6, None, [None, None, None], 4),
        (6, 2, [4, 4, 4], 4),
        (None, None, [2, 2, 2], None),
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
