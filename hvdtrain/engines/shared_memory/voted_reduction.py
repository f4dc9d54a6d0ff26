"""Votes on reductions of a node's ranks, which are run in the same call."""

from __future__ import annotations

import ctypes

from hvdtrain.engines.shared_memory.kernel import KernelCalls, Task
from hvdtrain.engines.shared_memory.memory import NodeArena
from hvdtrain.engines.shared_memory.peers import Peers
from hvdtrain.engines.votes import Verdict, VotedReduction

# In the order of the verdicts in node/task.h; the first one stands for a timeout.
VERDICTS = (Verdict.DIFFERENT, Verdict.DONE, Verdict.AGREED, Verdict.DIFFERENT)


class NodeVotedReduction(VotedReduction):
    """An allreduce in the slots and staging areas of a node group."""

    def __init__(
        self,
        calls: KernelCalls,
        task: Task,
        arena: NodeArena | None,
        peers: Peers,
    ) -> None:
        self._calls, self._task, self._address = calls, task, ctypes.addressof(task)
        self._arena, self._peers = arena, peers

    def __call__(self, ballot: bytes, source: int, target: int) -> Verdict:
        self._peers.check_now_and_then()
        if self._arena is not None:
            self._locate(self._arena, source, target)
        nanoseconds = self._peers.check_nanoseconds
        verdict = self._calls.vote(self._address, ballot, source, target, nanoseconds)
        while not verdict:
            self._peers.check()
            verdict = self._calls.resume(self._address, nanoseconds)
        return VERDICTS[verdict]

    def _locate(self, arena: NodeArena, source: int, target: int) -> None:
        location = arena.location_of(target) if source == target else 0
        self._task.location = location
        if location:
            addresses = arena.addresses(location)
            self._task.copies = (ctypes.c_uint64 * len(addresses))(*addresses)
