"""Element-wise maxima over the ranks of a node."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from hvdtrain.engines.communicator import Pending
from hvdtrain.engines.shared_memory.kernel import Team
from hvdtrain.engines.shared_memory.peers import Peers


class NodeMaximum(Pending):
    """A maximum that all ranks start; see NodeGroup.start_max."""

    def __init__(
        self, kernel: ctypes.CDLL, team: Team, values: npt.NDArray[np.uint64], peers: Peers
    ) -> None:
        self._kernel, self._team, self._peers = kernel, team, peers
        self._numbers = (ctypes.c_uint64 * values.size).from_buffer(values.data)
        kernel.hvd_start_max(team, self._numbers, values.size)

    def test(self) -> bool:
        if self._finish(0):
            return True
        self._peers.check_now_and_then()
        return False

    def wait(self) -> None:
        while not self._finish(self._peers.check_nanoseconds):
            self._peers.check()

    def _finish(self, nanoseconds: int) -> bool:
        numbers = self._numbers
        return bool(self._kernel.hvd_finish_max(self._team, numbers, len(numbers), nanoseconds))
