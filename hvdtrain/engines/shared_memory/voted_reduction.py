"""Votes on small reductions of a node's ranks, which carry the elements."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from hvdtrain.engines.shared_memory.kernel import KernelCalls, Task
from hvdtrain.engines.votes import Verdict, VotedReduction

__all__ = ["NodeVotedReduction"]

# In the order of the verdicts in node_kernel.c; the first one stands for a timeout.
_VERDICTS = (Verdict.DIFFERENT, Verdict.DONE, Verdict.AGREED, Verdict.DIFFERENT)


class NodeVotedReduction(VotedReduction):
    """An allreduce in the slots and staging areas of a node group.

    Args:
        calls: the kernel.
        task: reduction of at most a quarter of a chunk; source, data and ballot are set by calls.
        before: function that is called before each vote.
        check_peers: function that is called about once a second during a vote.
        timeout_nanoseconds: time after which a vote is interrupted to check the peers.
    """

    def __init__(
        self,
        calls: KernelCalls,
        task: Task,
        before: Callable[[], None],
        check_peers: Callable[[], None],
        timeout_nanoseconds: int,
    ) -> None:
        self._calls, self._task, self._address = calls, task, ctypes.addressof(task)
        self._before, self._check_peers = before, check_peers
        self._timeout_nanoseconds = timeout_nanoseconds

    def __call__(self, ballot: bytes, source: int, target: int) -> Verdict:
        self._before()
        timeout = self._timeout_nanoseconds
        verdict = self._calls.vote(self._address, ballot, source, target, timeout)
        while not verdict:
            self._check_peers()
            verdict = self._calls.resume(self._address, timeout)
        return _VERDICTS[verdict]
