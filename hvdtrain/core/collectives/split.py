"""Creation of a communicator of some of the members."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.request import Request
from hvdtrain.engines.communicator import Communicator


class Split(Operation):
    """Create a communicator; the result is None on ranks that are not members of it.

    It is an agreed operation because engines use the old communicator to create the new one, and
    the old one may be in use by a round.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__()
        self._ranks = ranks
        self.request = Request("opening a channel", details=(("ranks", str(list(ranks))),))

    def execute(self, communicator: Communicator) -> Communicator | None:
        return communicator.split(self._ranks)
