"""Communication of Python objects, which are pickled: all ranks run the same user's program.

Objects that pickle refuses, such as lambdas and classes defined inside a function, are pickled by
cloudpickle if it is installed; pickle can load both.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core import context, operations
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.operation import Request, Work
from hvdtrain.engines.communicator import poll_until
from hvdtrain.errors import HvdtrainError, MismatchError, PeerFailureError, UnsupportedError
from hvdtrain.types import ReduceOp

T = TypeVar("T")
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

# How adapters pickle their types, by type, where these cannot do that themselves.
reducers: dict[type, Any] = {}


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.dispatch_table = {**copyreg.dispatch_table, **reducers}


@dataclass(frozen=True)
class _Refusal:
    """Sent instead of an object that cannot be sent, so that all ranks learn of it."""

    reason: str


@collective
def broadcast_object(
    obj: object, root_rank: int = 0, name: str | None = None, channel: Channel | None = None
) -> Any:
    """Return rank `root_rank`'s object on every rank."""
    here = context.current()
    channel, name = channel or here.world, name or "object"
    is_root = here.topology.rank == root_rank
    payload, refusal = _packed(obj) if is_root else (np.empty(0, np.uint8), None)
    size = np.array([payload.size], np.int64)
    operations.broadcast(
        channel, Buffer.from_array(size), size.shape, root_rank, f"size of {name}"
    ).run()
    if not is_root:
        payload = np.empty(int(size[0]), np.uint8)
    operations.broadcast(channel, Buffer.from_array(payload), payload.shape, root_rank, name).run()
    if refusal is not None:
        raise refusal
    return obj if is_root else _loaded(payload)


@collective
def allgather_object(
    obj: object, name: str | None = None, channel: Channel | None = None
) -> list[Any]:
    """Return the objects of all ranks, by rank, on every rank."""
    payload, _ = _packed(obj)
    channel = channel or context.current().world
    buffers, shapes = [Buffer.from_array(payload)], [payload.shape]
    ((gathered, sizes),) = operations.allgather(channel, buffers, shapes, name or "object").run()
    parts = np.split(gathered.array(), np.cumsum(sizes)[:-1])
    return [_loaded(part) for part in parts]


@collective
def require_equal_variables(
    own: Sequence[tuple[str, str]] | None, operation: str, channel: Channel | None = None
) -> None:
    """Raise on all ranks if their variables, each a name and a kind, are not of the same kinds.

    A rank that gives None has nothing to compare.
    """
    channel = channel or context.current().world
    gathered = allgather_object(own, f"variables for {operation}", channel)
    pairs = zip(channel.ranks, gathered, strict=True)
    told = [(rank, found) for rank, found in pairs if found is not None]
    for rank, theirs in told:
        if difference := _difference(theirs, *told[0]):
            title = f"[rank {rank}/{context.current().topology.size}] {operation}"
            raise MismatchError(f"{title}: {difference}. Build the same model on every rank")


def _difference(
    theirs: Sequence[tuple[str, str]], rank: int, first: Sequence[tuple[str, str]]
) -> str:
    """Return the first difference from another rank, or ""."""
    for (name, kind), (other, expected) in zip(theirs, first, strict=False):
        if kind != expected:
            return f"{name} has {kind}, but rank {rank}'s {other} has {expected}"
    same = len(theirs) == len(first)
    return "" if same else f"{len(theirs)} variables, but rank {rank} has {len(first)}"


# How long a rank that has failed waits for the others to hear of it.
_LONGEST_SECONDS = 10.0


@collective
def vote(
    own: Sequence[bool], name: str, alone: Exception | None = None
) -> np.typing.NDArray[np.float64]:
    """Return what all ranks say, [len(own), ranks].

    Args:
        alone: given by a rank that has failed, and raised there if the others do not come soon:
            they may wait in an operation that it will not come to.
    """
    here = context.current()
    votes = np.zeros((len(own), here.topology.size))
    votes[:, here.topology.rank] = own
    voting = operations.allreduce(
        here.world, [Buffer.from_array(votes)], [votes.shape], ReduceOp.SUM, name
    )
    if alone is None:
        voting.run()
        return votes
    end = time.monotonic() + _LONGEST_SECONDS
    voting.start()
    poll_until(lambda: voting.done() or time.monotonic() > end)
    if not voting.done():
        raise alone
    voting.wait()
    return votes


@collective
def all_fail(name: str) -> bool:
    """Return whether all ranks have failed, and call this; not if one waits for this rank."""
    here = context.current()
    channel, blocked = here.world, list[int]()
    if not channel.has_thread:  # it takes part in one operation at a time
        return here.topology.size == 1
    channels = here.channels()
    for each in channels:
        each.listen(blocked.extend)
        each.end_pass()  # a pass that has failed fills no more buckets
    meeting = Work(Request("failed", name))
    channel.submit(meeting)
    # Where no rank hears of the others, rank 0 ends the job before they speak, too.
    end = time.monotonic() + _LONGEST_SECONDS * (1 if here.topology.rank == 0 else 1.5)
    poll_until(lambda: meeting.done or bool(blocked) or time.monotonic() > end)
    for each in channels:
        each.unlisten(blocked.extend)
    return meeting.done and not meeting.failed


@collective
@contextmanager
def together(name: str, channel: Channel | None = None) -> Iterator[list[Any]]:
    """Raise on all ranks what a block raises on one of them.

    The list in the context holds afterwards what all ranks have appended to it, by rank.
    """
    shared: list[Any] = []
    problem: Exception | None = None
    try:
        yield shared
    except PeerFailureError:  # no collective operation ends any more
        raise
    except Exception as error:  # of a user's class, too: the others wait for this rank
        unsent = isinstance(error, TypeError) and str(error).startswith("[rank ")
        problem = error if unsent or isinstance(error, HvdtrainError) else _told(error, name)
    found = allgather_object(shared if problem is None else problem, name, channel)
    for each in found:
        if isinstance(each, Exception):
            raise each
    shared[:] = [value for values in found for value in values]


def _told(error: Exception, name: str) -> UnsupportedError:
    """Return an error in one line, which can be pickled and read everywhere."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return UnsupportedError(f"{context.current().topology.title} {name}: {text}")


@collective
def gather_object(obj: object, name: str) -> list[Any] | None:
    """Return the objects of all ranks, by rank, on rank 0, and None elsewhere.

    They are sent one after the other, so that rank 0 holds the bytes of one at a time.
    """
    here = context.current().topology
    gathered = []
    for sender in range(here.size):
        payload = pickled(obj) if here.rank == sender else np.empty(0, np.uint8)
        gathered.append(_send(payload, 0, f"{name} of rank {sender}"))
    return gathered if here.rank == 0 else None


@collective
def scatter_object(objects: Sequence[object] | None, name: str) -> Any:
    """Return this rank's object of those of rank 0.

    They are sent one after the other, so that rank 0 holds the bytes of one at a time.
    """
    here, own = context.current().topology, None
    for receiver in range(here.size):
        payload = np.empty(0, np.uint8) if objects is None else pickled(objects[receiver])
        found = _send(payload, receiver, f"{name} of rank {receiver}")
        own = found if here.rank == receiver else own
    return own


@collective
def send_bytes(payload: Bytes, receiver: int, label: str) -> Bytes | None:
    """Send the payload of one rank, while those of others are empty; return it on the receiver."""
    here = context.current()
    splits = [payload.size if member == receiver else 0 for member in range(here.topology.size)]
    send = Buffer.from_array(payload)
    received, _ = operations.alltoall(here.world, send, payload.shape, splits, label).run()
    if here.topology.rank != receiver:
        return None
    return np.array(received.array())


@collective
def _send(payload: Bytes, receiver: int, label: str) -> Any:
    received = send_bytes(payload, receiver, label)
    return None if received is None else pickle.loads(received.data)


@collective
def call_on_root(function: Callable[[], T]) -> T:
    """Call `function` on rank 0 only; return its result on every rank."""
    result: T | HvdtrainError | None = None
    if context.current().topology.rank == 0:
        try:
            result = function()
        except HvdtrainError as error:
            result = error
    result = broadcast_object(result, name="result of rank 0")
    if isinstance(result, HvdtrainError):
        raise result
    return cast("T", result)


def _packed(obj: object) -> tuple[Bytes, TypeError | None]:
    """Return an object's pickle, or that of the reason why it has none and the error."""
    try:
        return pickled(obj), None
    except TypeError as error:
        return pickled(_Refusal(str(error))), error


def _loaded(payload: Bytes) -> Any:
    obj = pickle.loads(payload.tobytes())
    if isinstance(obj, _Refusal):
        raise TypeError(obj.reason)
    return obj


def pickled(obj: object) -> Bytes:
    stream = io.BytesIO()
    try:
        _Pickler(stream).dump(obj)
        data = stream.getvalue()
    except Exception as error:  # whatever a type's own code for it raises
        data = _pickled_by_value(obj, error)
    return np.frombuffer(data, np.uint8).copy()


def digest(obj: object) -> str:
    """Return the digest of plain values: None, numbers, text, bytes, and lists of them."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.fast = True  # else it would show which parts are one object
    pickler.dump(obj)
    return hashlib.blake2b(stream.getvalue(), digest_size=16).hexdigest()


def _pickled_by_value(obj: object, refusal: Exception) -> bytes:
    title, what = context.current().topology.title, type(obj).__name__
    try:
        import cloudpickle
    except ImportError:
        raise TypeError(
            f"{title}: this {what} cannot be sent ({refusal}): define its classes and functions "
            "at the top of a module, or pip install cloudpickle"
        ) from refusal
    try:
        return bytes(cloudpickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL))
    except Exception as error:
        raise TypeError(f"{title}: this {what} cannot be sent: {error}") from error
