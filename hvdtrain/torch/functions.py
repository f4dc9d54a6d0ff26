"""Broadcast of models, optimizers and Python objects: tensors of all kinds and other values."""

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
from hvdtrain.core.process_set import ProcessSet, channel_of, global_process_set
from hvdtrain.errors import MismatchError, UnsupportedError
from hvdtrain.torch.operations.gathers import broadcast_async_
from hvdtrain.torch.operations.parts import (
    describe_tensor,
    is_expanded,
    parameters_of,
    parts_of,
    require_values,
)
from hvdtrain.torch.operations.watched_models import monitor

__all__ = [
    "allgather_object",
    "broadcast_module",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


@collective
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of rank `root_rank` on every rank (collective, blocking).

    Args:
        obj: object that pickle supports, or cloudpickle where it is installed; used on
            `root_rank` only.
        root_rank: rank in the world.
        name: name in messages, equal on all ranks.
        process_set: ranks that take part.
    """
    return objects.broadcast_object(obj, root_rank, name, channel_of(process_set))


@collective
def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks in rank order on every rank (collective, blocking).

    Args:
        obj: object that pickle supports, or cloudpickle where it is installed.
        name: name in messages, equal on all ranks.
        process_set: ranks that take part.
    """
    return objects.allgather_object(obj, name, channel_of(process_set))


@collective
def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor] | torch.Tensor],
    root_rank: int = 0,
) -> None:
    """Overwrite parameters and buffers with those of `root_rank` (collective).

    Args:
        params: `model.state_dict()`, `model.named_parameters()` or tensors: dense ones of every
            dtype, sparse ones with as many elements on every rank, quantized ones of equal scales.
            What is no tensor, such as an extra state, must be equal on all ranks. The order of
            names may differ between ranks.
        root_rank: rank whose values are sent.

    Raises:
        MismatchError: names, shapes, dtypes or numbers of elements differ between ranks.
        UnsupportedError: `params` is none of these, has a name twice, or raises an error; a tensor
            is of a lazy module that has not run, or on the meta device. On every rank.
    """
    operation = "broadcast_parameters"
    title = f"{context.current().topology.title} {operation}"
    own: dict[str, str] = {}
    tensors: list[torch.Tensor] = []
    parts: dict[str, torch.Tensor] = {}
    with objects.together(operation) as digests:
        for path, leaf in (found for each in _named(params) for found in _leaves(*each)):
            if path in own:
                raise UnsupportedError(
                    f"{title}: two entries are called {path!r}, as in two models: call it once "
                    "for each model"
                )
            own[path] = _describe(leaf, f"{title}: {path!r}")
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
                parts |= {f"{path} {number}": part for number, part in enumerate(parts_of(leaf))}
        digests.append(objects.digest(sorted(own.items())))
    if len(set(digests)) > 1:
        with objects.together(operation):
            theirs = objects.broadcast_object(own, root_rank, operation)
            if difference := _difference(own, theirs, root_rank):
                raise MismatchError(f"{title}: {difference}")
    _broadcast(parts, root_rank)
    monitor.note_broadcast(tensors)


def _named(params: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise UnsupportedError(
            f"{context.current().topology.title} broadcast_parameters takes model.state_dict(), "
            f"model.named_parameters() or a list of tensors, got {type(params).__name__}"
        )
    items = params.items() if isinstance(params, Mapping) else params
    for number, item in enumerate(items):
        name, value = (None, item) if isinstance(item, torch.Tensor) else item
        yield f"tensor {number}" if name is None else str(name), value


@collective
def broadcast_module(module: torch.nn.Module, root_rank: int = 0) -> None:
    """Load the state of `root_rank` into a module, extra states included (collective)."""
    own = broadcast_stateful(module, root_rank, "state of a module")
    monitor.note_broadcast(tensor for tensor in own.values() if isinstance(tensor, torch.Tensor))


@collective
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Overwrite the optimizer's state and settings with those of `root_rank` (collective).

    State that only the root rank has is created on the other ranks without taking a step.

    Args:
        optimizer: torch optimizer or DistributedOptimizer over the same parameters in the same
            groups on every rank. Its state may have keys that are no parameters, and values of any
            kind that pickle supports.
        root_rank: rank whose state is sent.
        model: accepted for compatibility with Horovod; not used.

    Raises:
        MismatchError: the numbers of parameters differ from those on the root rank; on every rank.
        UnsupportedError: the state has a key that is a tensor, and none of the parameters.
        TypeError: something in the root rank's state cannot be pickled; on every rank.
    """
    operation, here = "broadcast_optimizer_state", context.current().topology
    parameters: list[torch.nn.Parameter] = []

    def make() -> dict[str, Any]:
        parameters.extend(parameters_of(optimizer))
        number = {id(parameter): index for index, parameter in enumerate(parameters)}
        mine: dict[Any, Any] = optimizer.state
        for key in mine:
            if isinstance(key, torch.Tensor) and id(key) not in number:
                raise UnsupportedError(
                    f"{here.title} {operation}: the optimizer has state for a tensor of shape "
                    f"{tuple(key.shape)} that is none of its parameters: remove it from "
                    "optimizer.state"
                )
        return {
            "settings": [
                {key: value for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ],
            "others": {key: value for key, value in mine.items() if id(key) not in number},
            "state": {number[id(key)]: value for key, value in mine.items() if id(key) in number},
            "counts": [len(group["params"]) for group in optimizer.param_groups],
        }

    def check(sent: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        if own["counts"] != sent["counts"]:
            raise MismatchError(
                f"{here.title} {operation}: this optimizer's groups have {own['counts']} "
                f"parameters, but rank {root_rank}'s have {sent['counts']}"
            )

    def device_of(keys: tuple[Any, ...]) -> torch.device:
        return parameters[keys[1] if keys[0] == "state" else 0].device

    _, sent = broadcast_state(make, device_of, root_rank, operation, check)
    received = {parameters[index]: entry for index, entry in sent["state"].items()}
    optimizer.state.clear()
    optimizer.state.update({**sent["others"], **received})
    for group, settings in zip(optimizer.param_groups, sent["settings"], strict=True):
        group.update(settings)


T = TypeVar("T")

_LOAD = "model.load_state_dict(hvd.broadcast_object(model.state_dict()))"
_MAPPINGS, _SEQUENCES, _SETS = (dict, OrderedDict), (list, tuple), (set, frozenset)
_VALUES = (type(None), bool, int, float, complex, str, bytes)
_LONG = 60


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
