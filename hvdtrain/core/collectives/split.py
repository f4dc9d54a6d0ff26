"""A communicator of some of the members."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.request import Request
from hvdtrain.engines.communicator import Communicator

__all__ = ["Split"]


class Split(Operation):
    """Make a communicator; the result is None on members that are not in it.

    It is agreed on because engines make it by way of the old one, which may be in the middle of
    a round for another operation.

    Args:
        ranks: of the members.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__()
        self._ranks = ranks
        self.request = Request("opening a channel", details=(("ranks", str(list(ranks))),))

    def execute(self, communicator: Communicator) -> Communicator | None:
        return communicator.split(self._ranks)
