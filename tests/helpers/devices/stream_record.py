"""Records what is put on the streams of the tests' device, and finds what may happen too early.

The device of `hidden_device` gets streams and events that only note what waits for what. The host's
threads count as one: what they do in which order is theirs to keep, and is tested elsewhere.

    install()
    record = Record()
    with record.running():
        ...                                  # with tensors on the device
    assert record.races() == []
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import hidden_device
import torch
from hidden_memory import DEVICE, elements_behind
from torch.utils._python_dispatch import TorchDispatchMode

_HOST = "host"

# Addresses of memory, and whether it is written.
Access = tuple[int, int, bool]


@dataclass
class _Entry:
    text: str
    before: int
    accesses: list[Access]


@dataclass
class Record:
    capturing: bool = False
    idle: bool = False
    _entries: list[_Entry] = field(default_factory=list)
    _last: dict[str, int] = field(default_factory=dict)  # of each stream, and of the host
    _users: dict[int, set[str]] = field(default_factory=dict)  # streams that memory is kept for
    _made_on: dict[int, tuple[str, int]] = field(default_factory=dict)  # stream and size
    _alive: list[torch.Tensor] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record; host memory is looked at in this thread only."""
        global _record
        _record = self
        try:
            with _HostOperators(self):
                yield
        finally:
            _record = None

    def put(self, place: str, text: str, accesses: list[Access], *after: int) -> int:
        with self._lock:
            before = self._last.get(place, 0) | self._last.get(_HOST, 0)
            for bits in after:
                before |= bits
            self._entries.append(_Entry(f"{text} on {place}", before, accesses))
            self._last[place] = before | 1 << len(self._entries) - 1
            return self._last[place]

    def last(self, place: str) -> int:
        with self._lock:
            return self._last.get(place, 0) | self._last.get(_HOST, 0)

    def host(self, text: str, accesses: list[Access], *after: int) -> None:
        self.put(_HOST, text, accesses, *after)

    def keep(self, tensor: torch.Tensor, stream: "Stream") -> None:
        with self._lock:
            self._users.setdefault(_storage_of(tensor), set()).add(stream.name)

    def made(self, tensor: torch.Tensor, place: str) -> None:
        storage = tensor.untyped_storage()
        address = _storage_of(tensor)
        if storage.nbytes() and address not in self._made_on:
            self._made_on[address] = place, storage.nbytes()
            behind = elements_behind(tensor).untyped_storage()
            weakref.finalize(behind, self._freed, address).atexit = False

    def _freed(self, address: int) -> None:
        """Give memory back: its stream may write other things there at once."""
        with self._lock:
            place, nbytes = self._made_on[address]
            after = [self.last(name) for name in self._users.get(address, ())]
            self.put(place, "next use", [(address, address + nbytes, True)], *after)

    def alive(self, tensor: torch.Tensor) -> None:
        self._alive.append(tensor)

    def races(self) -> list[str]:
        """Return the pairs of entries that use one memory in no order, the later of which was
        asked for after the earlier one."""
        found = []
        for later, entry in enumerate(self._entries):
            for earlier, other in enumerate(self._entries[:later]):
                if not entry.before >> earlier & 1 and _conflict(entry, other):
                    found.append(f"{entry.text} may come before {other.text}")
        return found

    def texts(self) -> list[str]:
        return [entry.text for entry in self._entries]


def _conflict(entry: _Entry, other: _Entry) -> bool:
    return any(
        start < other_end and other_start < end and (writes or other_writes)
        for start, end, writes in entry.accesses
        for other_start, other_end, other_writes in other.accesses
    )


@dataclass(frozen=True)
class Stream:
    name: str

    def record_event(self) -> "_Event":
        return _Event(_current().last(self.name) if _record else 0)

    def wait_event(self, event: "_Event") -> None:
        if _record:
            _record.put(self.name, "wait", [], event.after)


@dataclass(frozen=True)
class _Event:
    after: int

    def query(self) -> bool:
        return _current().idle

    def synchronize(self) -> None:
        if _record:
            _record.host("wait", [], self.after)


_record: Record | None = None
_local = threading.local()
_DEFAULT = Stream("default")
_made: list[Stream] = []


def _current() -> Record:
    assert _record is not None
    return _record


def _current_stream(_: object = None) -> Stream:
    return getattr(_local, "stream", _DEFAULT)


@contextmanager
def _device(device: torch.device) -> Iterator[None]:
    before, _local.device = getattr(_local, "device", None), device
    try:
        yield
    finally:
        _local.device = before


@contextmanager
def _stream(stream: Stream) -> Iterator[None]:
    before, _local.stream = _current_stream(), stream
    try:
        yield
    finally:
        _local.stream = before


def _new_stream(*_: object) -> Stream:
    _made.append(Stream(f"stream {len(_made) + 1}"))
    return _made[-1]


def _record_stream(tensor: torch.Tensor, stream: "Stream") -> None:
    if _record:
        _record.keep(tensor, stream)


def install() -> None:
    hidden_device.install()
    module: Any = getattr(torch, DEVICE)
    module.Stream, module.current_stream, module.stream = _new_stream, _current_stream, _stream
    module.device = _device
    module.is_current_stream_capturing = lambda: _record is not None and _record.capturing
    torch.Tensor.record_stream = _record_stream  # type: ignore[method-assign,assignment]
    hidden_device.observers.append(_observe)


def note(text: str, accesses: list[Access], on_host: bool) -> None:
    """Record what an engine does: at once, or on the calling thread's current stream."""
    if _record is not None:
        # A thread of a channel begins on device 0, wherever its rank is.
        assert on_host or getattr(_local, "device", None) is not None, text
        _record.put(_HOST if on_host else _current_stream().name, text, accesses)


def _observe(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    if _record is None:
        return
    place = _current_stream().name
    for tensor in _tensors(result):
        if tensor.device.type == DEVICE:
            _record.made(tensor, place)
    accesses = _accesses(op, args, kwargs, result)
    if not accesses:
        return
    bits = _record.put(place, op.overloadpacket.__name__, accesses)
    if op is torch.ops.aten._copy_from.default:
        for tensor in args[:2]:
            if tensor.is_cpu:
                _record.alive(tensor)
        if args[0].device != args[1].device and True not in args[2:]:
            _record.host("wait for a copy", [], bits)
    elif "_local_scalar_dense" in str(op):
        _record.host("wait for a number", [], bits)


class _HostOperators(TorchDispatchMode):
    """Records operators on host memory, which are done when they return."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        involved = [*_tensors(args), *_tensors(kwargs), *_tensors(result)]
        if all(tensor.is_cpu for tensor in involved):
            for tensor in involved:
                self._record.alive(tensor)
            accesses = _accesses(func, args, kwargs or {}, result)
            if accesses:
                self._record.host(func.overloadpacket.__name__, accesses)
        return result


def _accesses(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> list[Access]:
    """Return what memory an operator reads and writes; none of one that only makes or views it."""
    name = op.overloadpacket.__name__
    if name == "_copy_from":
        return [*_spans(args[0], writes=False), *_spans(args[1], writes=True)]
    if name.startswith("empty") or any(
        value.alias_info is not None and not value.alias_info.is_write
        for value in op._schema.returns
    ):
        return []
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    found = []
    for argument in op._schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        found += _spans(given.get(argument.name), writes)
    return found + _spans(result, writes=True)


def _spans(value: Any, writes: bool) -> list[Access]:
    return [(*span_of(tensor), writes) for tensor in _tensors(value) if tensor.numel()]


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
