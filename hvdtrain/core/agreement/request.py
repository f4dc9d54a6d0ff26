"""Requests: the descriptions of operations on which ranks agree."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b

from hvdtrain.types import DType, ReduceOp


@dataclass(frozen=True)
class Zeros:
    """The parameters with which a joined rank takes part in a reduction, contributing zeros."""

    buffers: tuple[tuple[int, DType], ...]
    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0
    devices: tuple[str, ...] = ()
    half: str = ""


@dataclass(frozen=True)
class Request:
    """The description of an operation, which must be equal on all ranks."""

    operation: str
    name: str = ""
    details: tuple[tuple[str, str], ...] = ()
    zeros: Zeros | None = field(default=None, compare=False)
    instead: str = field(default="", compare=False)

    @cached_property
    def key(self) -> str:
        """The key by which requests of different ranks are matched."""
        return f"{self.operation}.{self.name}"

    @property
    def subject(self) -> str:
        """The operation and its name, for messages."""
        named = self.name and not self.name.startswith(UNNAMED)
        return f"{self.operation} {self.name!r}" if named else self.operation

    def __str__(self) -> str:
        details = ", ".join(f"{key} {value}" for key, value in self.details)
        return f"{self.subject} ({details})" if details else self.subject

    @cached_property
    def packed(self) -> bytes:
        return pickle.dumps((self.operation, self.name, self.details, self.zeros, self.instead))

    @cached_property
    def ballot(self) -> bytes:
        """A hash of the request and the complement of the hash, 16 bytes in all."""
        hasher = self._beginning.copy()
        hasher.update(self.name.encode())
        return _with_complement(hasher.digest())

    @cached_property
    def _beginning(self) -> blake2b:
        return _hasher(self.operation, self.details)

    def renamed(self, name: str) -> Request:
        made = object.__new__(Request)
        hasher = self._beginning.copy()
        hasher.update(name.encode())
        hashed = hasher.digest()
        # A frozen dataclass sets its attributes one by one, which takes longer.
        made.__dict__.update(
            operation=self.operation,
            name=name,
            details=self.details,
            zeros=self.zeros,
            instead=self.instead,
            _beginning=self._beginning,
            key=f"{self.operation}.{name}",
            ballot=hashed + hashed.translate(_COMPLEMENT),
        )
        return made


def ballot(ballots: Sequence[bytes]) -> bytes:
    """Return the ballot of a list of requests: a hash of their ballots, and its complement."""
    if len(ballots) == 1:
        return ballots[0]
    return _with_complement(blake2b(b"".join(ballots), digest_size=_HASH_BYTES).digest())


def _with_complement(hashed: bytes) -> bytes:
    return hashed + hashed.translate(_COMPLEMENT)


# A training loop submits the same requests again and again, or with other numbers.
@lru_cache(maxsize=4096)
def _hasher(operation: str, details: tuple[tuple[str, str], ...]) -> blake2b:
    """Return a hasher of what precedes the name; to be copied."""
    texts = [operation, *(text for pair in details for text in pair), ""]
    return blake2b("\0".join(texts).encode(), digest_size=_HASH_BYTES)


@lru_cache(maxsize=4096)
def unpacked(text: bytes) -> Request:
    """Return the request that another rank has packed."""
    return Request(*pickle.loads(text))


_HASH_BYTES = 8
_COMPLEMENT = bytes(reversed(range(256)))

# The prefix of names given to operations without one.
UNNAMED = "noname."

# The detail that counts the steps of a rank's program.
STEPS = "step"

JOIN = Request("join")
LEAVE = Request("leave the job")

# The vote of a member that has no request, but listens for blocked members; never reported.
LISTEN = Request("listen")
