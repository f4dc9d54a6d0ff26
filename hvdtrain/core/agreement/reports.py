"""The exchange of reports after a vote that has failed."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Iterator
from struct import Struct

from hvdtrain.collective import collective
from hvdtrain.core.agreement.decision import Report
from hvdtrain.core.agreement.request import Request, unpacked
from hvdtrain.core.agreement.votes import gather_bytes
from hvdtrain.engines.communicator import Communicator

# Time since the member joined, and bytes of the requests that have no number, which are at the end.
_HEADER = Struct("=di")

# Programs that give each operation another name must not fill the memory.
_MOST_NUMBERS = 4096


class ReportExchange:
    """Exchanges reports, in which requests that were exchanged before are numbers.

    All members number the requests in the same order, that of the reports in which they come first.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._requests: list[Request] = []
        self._numbers: dict[bytes, int] = {}  # by ballot

    @collective
    def __call__(self, own: Report) -> tuple[Report, ...]:
        """Return the reports of all members, by rank."""
        messages = gather_bytes(self._communicator, self._packed(own))
        reports = tuple([self._unpacked(message) for message in messages])
        if len(self._requests) > _MOST_NUMBERS:
            self._requests.clear()
            self._numbers.clear()
        return reports

    def _packed(self, own: Report) -> bytes:
        # Twice the number, plus one if the request is awaited; negative if it has no number yet.
        codes, unknown = array("i"), []
        for request in own.requests:
            number = self._numbers.get(request.ballot, -1)
            if number < 0:
                unknown.append(request.packed)
            codes.append(2 * number + (request.key in own.awaited))
        texts = pickle.dumps(unknown) if unknown else b""
        header = _HEADER.pack(own.joined_seconds, len(texts))
        return header + codes.tobytes() + texts

    def _unpacked(self, message: bytes) -> Report:
        joined_seconds, size = _HEADER.unpack_from(message)
        end = len(message) - size
        codes = array("i", message[_HEADER.size : end])
        texts: Iterator[bytes] = iter(pickle.loads(message[end:]) if size else ())
        requests = [self._requests[code >> 1] if code >= 0 else self._new(texts) for code in codes]
        awaited = [r.key for r, code in zip(requests, codes, strict=True) if code & 1]
        return Report(tuple(requests), frozenset(awaited), joined_seconds)

    def _new(self, texts: Iterator[bytes]) -> Request:
        """Number the next request, unless another member has reported it in the same exchange."""
        request = unpacked(next(texts))
        number = self._numbers.setdefault(request.ballot, len(self._requests))
        if number == len(self._requests):
            self._requests.append(request)
        return self._requests[number]
