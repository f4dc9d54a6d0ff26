"""What `hvdtrain check --job` makes of the facts of a job, of which each case changes some."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from hvdtrain.check.job import judge_job, read_ranks

NODES = 6
HOSTS = [f"node{number}" for number in range(NODES)]
FACTS: Mapping[str, Any] = {
    "versions": {"hvdtrain": "1.0", "torch": "2.0"},
    "machine": {"CPU": "fast", "cores": 8, "memory": "64 GiB"},
    "bound_to": "0-7", "threads": 4, "near_gpus": [], "advice": [],
    "size": NODES, "level": "multiple", "no_shared_memory": "", "tcp": {"hsn0": ""},
}  # fmt: skip
OLD = {"versions": {"hvdtrain": "0.9", "torch": "2.0"}}
# A rank that was met, the microseconds of a message, and the seconds by which its clock is ahead.
TO_3 = {"messages": [(3, 900.0, 0.0), *((peer, 2.0, 0.0) for peer in (1, 2, 4, 5))]}
FROM_3 = {"messages": [(4, 800.0, 0.0), (5, 2.0, 0.0)]}
AHEAD = {"messages": [(1, 2.0, 0.1), (2, 2.0, 0.0), (3, 2.0, 0.2), (4, 2.0, -70.0), (5, 2.0, 0.0)]}
OWN_AHEAD = {"messages": [(rank, 2.0, -9.0) for rank in range(1, NODES)]}
BLOCKED = {"tcp": {"hsn0": "timed out"}}
HALF = {"tcp": {"hsn0": "", "eth0": "timed out"}}


def facts_of(changes: Mapping[int, Mapping[str, Any] | None]) -> dict[int, dict[str, Any]]:
    """Return the facts of a rank on each node; without those that are changed to None."""
    ranks = {rank: changes.get(rank, {}) for rank in range(NODES)}
    given = {rank: change for rank, change in ranks.items() if change is not None}
    return {rank: {"rank": rank, "host": HOSTS[rank], **FACTS, **c} for rank, c in given.items()}


def stuck(peer: int) -> dict[str, Any]:
    """Return the change that has a rank wait for another one."""
    return {"size": None, "waits_for": peer}


@pytest.mark.parametrize(
    ("changes", "fails", "text"),
    [
        ({3: OLD}, True, "hvdtrain: 1.0 on node[0-2], node[4-5], 0.9 on node3: use one "),
        ({0: TO_3, 3: FROM_3}, False, "slow: node0 to node3 900 us, node3 to node4 800 us, others"),
        # Without a core for each rank of a node, its messages say nothing.
        ({0: TO_3, 3: {"bound_to": ""}}, False, "rank 3 on node3: 0 core for all of them:"),
        ({0: AHEAD}, False, "clocks: node4 -70.0 s: logs"),
        ({0: OWN_AHEAD}, False, "clocks: node0 +9.0 s: logs"),
        ({3: {"tcp": {"eno1": None}}}, False, "node3: the next node has no address on eno1: name"),
        ({3: {"size": None, "failed": "E: no libmpi"}}, True, "node3: E: no libmpi: mend it there"),
        ({3: HALF}, False, "node3: the next node is not reached on eth0 (timed out): open"),
        (
            {0: {"no_shared_memory": "no memfd"}},
            False,
            "node0: ranks use MPI, which is slower: no memfd",
        ),
        ({1: {"advice": ["x"]}, 2: {"advice": ["x"]}}, False, "node[1-2]: x"),
        ({4: None, 5: None}, True, "node[4-5]: no answer (no time): log in and try Python there"),
        ({2: stuck(4), 4: {"size": None}}, True, "node4: no answer (no time): log in"),
        ({rank: {"size": None} for rank in (1, 4)}, True, "MPI does not connect node1 to the oth"),
        ({2: stuck(4), 4: stuck(-1)}, True, "MPI does not connect node2 to node4, node4 to the ot"),
        ({rank: {"size": 1} for rank in range(NODES)}, True, "ranks formed worlds of 1: start "),
    ],
)
def test_what_is_wrong_with_a_job(
    changes: Mapping[int, Mapping[str, Any] | None], fails: bool, text: str
) -> None:
    ranks = facts_of(changes)
    for facts in ranks.values():
        if facts["size"] is None:
            del facts["size"]
    assert judge_job(facts_of({}), HOSTS, 1, "") == ([], [])
    ending = "no time" if "answer" in text or "connect" in text else ""
    problems, remarks = judge_job(ranks, HOSTS, 1, ending)
    (said,) = problems + remarks
    assert (bool(problems), said.startswith(text)) == (fails, True), said


def test_text_about_many_hosts_is_short() -> None:
    hosts = [f"node{number}" for number in range(0, 2000, 2)]
    given = {"rank": 0, **FACTS, "size": len(hosts)}
    ranks = {rank: {**given, "host": host} for rank, host in enumerate(hosts)}
    for rank in range(0, 1000, 2):
        ranks[rank] |= {**OLD, **BLOCKED, "advice": ["x", f"y {rank}"], "level": "single"}
    ranks[0]["messages"] = [(rank, 2.0 + 100 * (rank > 500), 5.0 * rank) for rank in range(1, 1000)]
    problems, remarks = judge_job(ranks, hosts, 1, "")
    assert (len(problems), len(remarks)) == (2, 9)
    assert max(map(len, problems + remarks)) < 500
    assert remarks[-1] == "496 more, which --json shows"


def test_lines_of_ranks_among_others() -> None:
    one, two, other = ({"rank": 1, "host": "a"}, {"rank": 1, "size": 2}, {"rank": 0, "size": 2})
    text = f'hello\n{json.dumps(one)}\r\n{{"rank"...\n{json.dumps(two)}{json.dumps(other)}'
    assert read_ranks(text) == {1: one | two}
