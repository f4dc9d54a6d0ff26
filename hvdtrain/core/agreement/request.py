"""What a rank wants to do next."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b

from hvdtrain.types import DType, ReduceOp

__all__ = ["JOIN", "LEAVE", "LISTEN", "UNNAMED", "Request", "Zeros", "ballot", "unpacked"]


@dataclass(frozen=True)
class Zeros:
    """What a joined rank needs to take part in a reduction with zeros.

    Attributes:
        buffers: number and type of the elements of each buffer.
        op: the reduction.
        prescale: factor before it, by which ranks know what they reduce together.
        postscale: factor after it, which a joined rank applies to others' copies, too.
        devices: for each buffer the type of its device, as "cuda"; none: all in host memory.
    """

    buffers: tuple[tuple[int, DType], ...]
    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """An operation as ranks tell it to one another; equal where they must do the same.

    Attributes:
        operation: what to do.
        name: of the user's; "" where there can be but one such request at a time.
        details: named properties that must be equal on all ranks (type, shape, root rank, ...).
        zeros: how a joined rank takes part; None where it cannot.
    """

    operation: str
    name: str = ""
    details: tuple[tuple[str, str], ...] = ()
    zeros: Zeros | None = field(default=None, compare=False)

    @cached_property
    def key(self) -> str:
        """By what ranks find one another's requests."""
        return f"{self.operation}.{self.name}"

    @property
    def subject(self) -> str:
        """The operation and its name."""
        named = self.name and not self.name.startswith(UNNAMED)
        return f"{self.operation} {self.name!r}" if named else self.operation

    def __str__(self) -> str:
        details = ", ".join(f"{key} {value}" for key, value in self.details)
        return f"{self.subject} ({details})" if details else self.subject

    @cached_property
    def packed(self) -> bytes:
        """Itself for other ranks."""
        return pickle.dumps((self.operation, self.name, self.details, self.zeros))

    @cached_property
    def ballot(self) -> bytes:
        """16 bytes, a hash and its complement, that are equal exactly for equal requests."""
        fields = [self.operation, self.name, *(text for pair in self.details for text in pair)]
        return _with_complement("\0".join(fields).encode())


def ballot(ballots: Sequence[bytes]) -> bytes:
    """Return 16 bytes for a list of requests' ballots, as if it were one request."""
    return ballots[0] if len(ballots) == 1 else _with_complement(b"".join(ballots))


def _with_complement(content: bytes) -> bytes:
    hashed = blake2b(content, digest_size=8).digest()
    return hashed + hashed.translate(_COMPLEMENT)


# A training loop asks for the same things again and again.
@lru_cache(maxsize=4096)
def unpacked(text: bytes) -> Request:
    """Return what another rank has packed."""
    return Request(*pickle.loads(text))


_COMPLEMENT = bytes(reversed(range(256)))

# How the names begin that operations get for want of one.
UNNAMED = "noname."

JOIN = Request("join")
LEAVE = Request("leave the job")

# Nothing, of a member that wants to know whether others wait for it; never exchanged.
LISTEN = Request("listen")
