"""Memory that all members get together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hvdtrain.core.operation import Operation
from hvdtrain.core.request import Request
from hvdtrain.engines.communicator import Communicator

__all__ = ["Memory"]


class Memory(Operation):
    """Get memory that the communicator reduces fastest; the result is an array of bytes.

    Args:
        nbytes: equal on all members.
        name: equal on all members.
    """

    def __init__(self, nbytes: int, name: str) -> None:
        super().__init__()
        self._size = nbytes
        self.request = Request("memory", name, (("bytes", str(nbytes)),))

    def execute(self, communicator: Communicator) -> npt.NDArray[np.uint8]:
        return communicator.empty(self._size)
