"""The state of modules and optimizers, sent to all ranks: tensors of all kinds and other values."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hvdtrain.collective import collective
from hvdtrain.core import context, objects
from hvdtrain.errors import MismatchError, UnsupportedError
from hvdtrain.torch.operations.gathers import broadcast_async_
from hvdtrain.torch.tensors.parts import describe_tensor, is_expanded, parts_of, require_values

T = TypeVar("T")

_LOAD = "model.load_state_dict(hvd.broadcast_object(model.state_dict()))"
_MAPPINGS, _SEQUENCES, _SETS = (dict, OrderedDict), (list, tuple), (set, frozenset)
_VALUES = (type(None), bool, int, float, complex, str, bytes)
_LONG = 60


@collective
def overwrite_tensors(
    named: Iterable[tuple[str, Any]], root_rank: int, operation: str
) -> list[torch.Tensor]:
    """Overwrite all tensors in values by those of `root_rank`; return them."""
    title = context.current().topology.title
    own: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    parts: dict[str, torch.Tensor] = {}
    with objects.together(operation) as digests:
        for path, leaf in (each for name, value in named for each in _leaves(name, value)):
            if path in own:
                raise UnsupportedError(
                    f"{title} {operation}: two entries are called {path!r}, as in two models: call "
                    "it once for each model"
                )
            own[path] = _describe(leaf, f"{title} {operation}: {path!r}")
            if isinstance(leaf, torch.Tensor):
                tensors[path] = leaf
                parts |= {f"{path} {number}": part for number, part in enumerate(parts_of(leaf))}
        digests.append(objects.digest(sorted(own.items())))
    if len(set(digests)) > 1:
        with objects.together(operation):
            theirs = objects.broadcast_object(own, root_rank, operation)
            if difference := _difference(own, theirs, root_rank):
                raise MismatchError(f"{title} {operation}: {difference}")
    _broadcast(parts, root_rank)
    return list(tensors.values())


def _broadcast(tensors: Mapping[str, torch.Tensor], root_rank: int) -> None:
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in tensors.items()]
    for handle in handles:
        handle.wait()


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield path, value
    for key, item in _items(value):
        yield from _leaves(f"{path}[{key!r}]", item)


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if type(value) in _MAPPINGS:
        return value.items()  # type: ignore[no-any-return]
    return enumerate(value) if type(value) in _SEQUENCES else ()


def _describe(value: Any, subject: str) -> str:
    """Return what must be equal on all ranks, in words."""
    if isinstance(value, torch.Tensor):
        return describe_tensor(value, subject)
    kind = "dict" if type(value) in _MAPPINGS else type(value).__name__
    if kind == "dict" or type(value) in _SEQUENCES:
        return kind  # what they hold follows
    if isinstance(value, _VALUES) and len(repr(value)) <= _LONG:
        return repr(value)
    if type(value) in _SETS and all(isinstance(each, _VALUES) for each in value):
        value = sorted(map(repr, value))
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        kind, value = f"{value.dtype.str}{list(value.shape)}", value.tobytes()
    elif type(value) not in _VALUES:
        return kind  # pickles of equal objects may differ
    return f"{kind} with digest {objects.digest(value)}"


def _difference(own: Mapping[str, str], theirs: Mapping[str, str], root: int) -> str | None:
    """Return the first difference from the root rank, or None."""
    same = "Build the same model on every rank"
    for path in {**theirs, **own}:
        mine, other = own.get(path), theirs.get(path)
        if mine is None:
            return f"has no {path!r}, but rank {root} has. {same}"
        if other is None:
            return f"has {path!r}, but rank {root} has not. {same}"
        if mine != other:
            return f"{path!r} is {mine}, but {other} on rank {root}. {same}, or {_LOAD}"
    return None


@dataclass(frozen=True)
class _Sent:
    """A tensor of the root rank, in host memory; dense ones are on the meta device, and follow."""

    tensor: torch.Tensor
    on_host: bool


@collective
def broadcast_state(
    make: Callable[[], T],
    device_of: Callable[[tuple[Any, ...]], torch.device],
    root_rank: int,
    operation: str,
    check: Callable[[T, T], None] = lambda sent, own: None,
) -> tuple[T, T]:
    """Return what `make` returns here, and on the root rank in tensors of this rank.

    Own tensors are overwritten where they fit; `device_of` gives the device of new ones by their
    keys, unless they are on the host on the root rank. `check` gets the root rank's state without
    its tensors, and this rank's own.
    """
    here = context.current().topology
    is_root = here.rank == root_rank
    with objects.together(operation) as outlines:
        own = make()
        if is_root:
            outlines.append(objects.pickled(_outline(own, f"{here.title} {operation}:")))
    arriving: list[torch.Tensor] = []

    def target(sent: Any, mine: Any, keys: tuple[Any, ...]) -> Any:
        """Return the root rank's state in tensors that are then overwritten."""
        if isinstance(sent, _Sent):
            if sent.tensor.is_meta and _takes(mine, sent.tensor):
                arriving.append(mine)
                return mine
            device = torch.device("cpu")
            if not sent.on_host:
                near = isinstance(mine, torch.Tensor) and not (mine.is_cpu or mine.is_meta)
                device = mine.device if near else device_of(keys)
            if not sent.tensor.is_meta:
                return sent.tensor.to(device)
            arriving.append(torch.empty_like(sent.tensor, device=device))
            return arriving[-1].copy_(mine) if is_root else arriving[-1]
        if type(sent) not in (dict, *_SEQUENCES):
            return sent
        known = dict(_items(mine))
        found = {key: target(item, known.get(key), (*keys, key)) for key, item in _items(sent)}
        return found if type(sent) is dict else type(sent)(found.values())

    with objects.together(operation):
        if len(outlines) != 1:
            raise MismatchError(
                f"{here.title} {operation}: {len(outlines)} ranks send, with root_rank={root_rank} "
                f"here: pass one of ranks 0 to {here.size - 1}, the same on every rank"
            )
        outline = pickle.loads(outlines[0])
        check(outline, own)
        state = target(outline, own, ())
        parts = [part for tensor in arriving for part in parts_of(tensor)]
    _broadcast({f"{operation} {number}": part for number, part in enumerate(parts)}, root_rank)
    return own, state


@collective
def broadcast_stateful(value: Any, root_rank: int, operation: str) -> Any:
    """Load the state of `root_rank`; return this rank's own."""
    cpu = torch.device("cpu")
    own, state = broadcast_state(value.state_dict, lambda keys: cpu, root_rank, operation)
    with objects.together(operation):
        if context.current().topology.rank != root_rank:
            if isinstance(own, MutableMapping):
                loaded = copy.copy(own)  # with the versions of a module's parts
                loaded.clear()
                loaded.update(state)
                state = loaded
            value.load_state_dict(state)
    return own


def _outline(value: Any, subject: str) -> Any:
    if isinstance(value, torch.Tensor):
        require_values(value, subject)
        if _is_dense(value) and not value.is_quantized:
            sent = torch.empty(value.shape, dtype=value.dtype, device="meta")
        else:
            sent = value.detach().cpu()
        return _Sent(sent, value.device.type == "cpu")
    if type(value) in _MAPPINGS:
        return {key: _outline(item, f"{subject} {key!r}") for key, item in value.items()}
    if type(value) in _SEQUENCES:
        return type(value)(_outline(item, f"{subject} {i}") for i, item in enumerate(value))
    return value


def _is_dense(tensor: torch.Tensor) -> bool:
    wrapped = is_traceable_wrapper_subclass(tensor)
    return tensor.layout is torch.strided and not (wrapped or tensor.is_nested)


def _takes(tensor: Any, sent: torch.Tensor) -> bool:
    """Return whether a value is a tensor that can be overwritten."""
    if not isinstance(tensor, torch.Tensor) or is_lazy(tensor) or tensor.is_meta:
        return False
    if not _is_dense(tensor) or is_expanded(tensor):
        return False
    return (tensor.shape, tensor.dtype) == (sent.shape, sent.dtype)


def snapshot(state: Any) -> Any:
    """Return a deep copy of a state with tensors of all kinds."""
    if isinstance(state, torch.Tensor) and not is_lazy(state):
        return state.detach().clone()  # torch deep-copies no sparse CSR tensors
    if type(state) in _MAPPINGS:
        copied = copy.copy(state)  # with the versions of modules, an attribute of a state_dict()
        copied.update((key, snapshot(value)) for key, value in state.items())
        return copied
    if type(state) in _SEQUENCES:
        return type(state)(snapshot(value) for value in state)
    return copy.deepcopy(state)
