"""The state of modules and optimizers, sent to all ranks: tensors of all kinds and other values."""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hvdtrain.collective import collective
from hvdtrain.core import context, objects
from hvdtrain.errors import HvdtrainError, MismatchError, UnsupportedError
from hvdtrain.torch.operations.broadcast import broadcast_, broadcast_async_
from hvdtrain.torch.tensors.parts import describe_tensor, is_expanded, parts_of, require_values

_LOAD = "model.load_state_dict(hvd.broadcast_object(model.state_dict()))"
_MAPPINGS, _SEQUENCES = (dict, OrderedDict), (list, tuple)
_VALUES = (type(None), bool, int, float, complex, str, bytes)
_LONG = 60


@collective
def overwrite_tensors(named: Mapping[str, Any], root_rank: int, operation: str) -> None:
    """Overwrite all tensors in values by those of `root_rank`."""
    title = context.current().topology.title
    leaves = {path: leaf for name, value in named.items() for path, leaf in _leaves(name, value)}
    own: dict[str, str] | None = None
    problem: HvdtrainError | None = None
    try:
        own = {
            path: _describe(leaf, f"{title} {operation}: {path!r}") for path, leaf in leaves.items()
        }
    except UnsupportedError as error:
        problem = error
    theirs = objects.broadcast_object(own, root_rank, operation)
    if own is not None and theirs is not None and (difference := _difference(own, theirs)):
        problem = MismatchError(f"{title} {operation}: {difference.format(root=root_rank)}")
    objects.raise_together(problem, operation)
    handles = [
        broadcast_async_(part, root_rank, f"{path} {number}" if number else path)
        for path, leaf in leaves.items()
        if isinstance(leaf, torch.Tensor)
        for number, part in enumerate(parts_of(leaf))
    ]
    for handle in handles:
        handle.wait()


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) in _MAPPINGS:
        inner = value.items()
    elif type(value) in _SEQUENCES:
        inner = enumerate(value)
    else:
        yield path, value
        return
    for key, item in inner:
        yield from _leaves(f"{path}/{key}", item)


def _describe(value: Any, subject: str) -> str:
    """Return what must be equal on all ranks, in words."""
    if isinstance(value, torch.Tensor):
        return describe_tensor(value, subject)
    text = repr(value) if isinstance(value, _VALUES) else type(value).__name__
    if len(text) > _LONG:
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        text = f"{type(value).__name__} with digest {digest}"
    return text


def _difference(own: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Return the first difference from the root rank, "{root}" standing for it, or None."""
    same = "Build the same model on every rank"
    for path in {**theirs, **own}:
        mine, other = own.get(path), theirs.get(path)
        if mine is None:
            return f"has no {path!r}, but rank {{root}} has. {same}"
        if other is None:
            return f"has {path!r}, but rank {{root}} has not. {same}"
        if mine != other:
            return (
                f"{path!r} is {_escaped(mine)}, but {_escaped(other)} on rank {{root}}. {same}, or "
                f"{_LOAD}"
            )
    return None


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


@dataclass(frozen=True)
class _Dense:
    """Placeholder of a dense tensor of the root rank, which is sent separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool


@dataclass(frozen=True)
class _Whole:
    """Another tensor of the root rank, in host memory."""

    tensor: torch.Tensor
    on_host: bool


@collective
def send_outline(
    mine: Any, root_rank: int, operation: str, problem: HvdtrainError | None = None
) -> Any:
    """Return the root rank's state with placeholders for its dense tensors."""
    here, outline = context.current().topology, None
    if here.rank == root_rank and problem is None:
        try:
            outline = _outline(mine, f"{here.title} {operation}:")
        except UnsupportedError as error:
            problem = error
    outline = objects.broadcast_object(outline, root_rank, operation)
    objects.raise_together(problem, operation)
    return outline


def _outline(value: Any, subject: str) -> Any:
    if isinstance(value, torch.Tensor):
        require_values(value, subject)
        on_host = value.device.type == "cpu"
        dense = value.layout is torch.strided and not value.is_quantized
        if dense and not is_traceable_wrapper_subclass(value):
            return _Dense(tuple(value.shape), value.dtype, on_host)
        return _Whole(value.detach().cpu(), on_host)
    if type(value) in _MAPPINGS:
        return {key: _outline(item, f"{subject} {key!r}") for key, item in value.items()}
    if type(value) in _SEQUENCES:
        return type(value)(_outline(item, f"{subject} {i}") for i, item in enumerate(value))
    return value


@collective
def receive(sent: Any, mine: Any, device: torch.device, root_rank: int, name: str) -> Any:
    """Return the root rank's state, in this rank's tensors where they fit."""
    if isinstance(mine, torch.Tensor) and not (mine.is_cpu or mine.is_meta):
        device = mine.device
    if isinstance(sent, _Whole):
        return sent.tensor if sent.on_host else sent.tensor.to(device)
    if isinstance(sent, _Dense):
        return _receive_dense(sent, mine, device, root_rank, name)
    if type(sent) is dict:
        known = mine if type(mine) in _MAPPINGS else {}
    elif type(sent) in _SEQUENCES:
        known = dict(enumerate(mine)) if type(mine) in _SEQUENCES else {}
    else:
        return sent
    found = {
        key: receive(value, known.get(key), device, root_rank, f"{name} {key!r}")
        for key, value in (sent.items() if type(sent) is dict else enumerate(sent))
    }
    return found if type(sent) is dict else type(sent)(found.values())


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


def _receive_dense(
    sent: _Dense, mine: Any, device: torch.device, root_rank: int, name: str
) -> torch.Tensor:
    if not _takes(mine, sent):
        target = torch.device("cpu") if sent.on_host else device
        new = torch.empty(sent.shape, dtype=sent.dtype, device=target)
        is_root = context.current().topology.rank == root_rank
        mine = new.copy_(mine) if is_root else new
    result: torch.Tensor = mine
    for part in parts_of(result):
        broadcast_(part, root_rank, name)
    return result


def _takes(tensor: Any, sent: _Dense) -> bool:
    """Return whether a value is a tensor that can be overwritten."""
    if not isinstance(tensor, torch.Tensor) or is_lazy(tensor) or tensor.is_meta:
        return False
    wrapped = is_traceable_wrapper_subclass(tensor)
    if wrapped or tensor.layout is not torch.strided:
        return False
    return (tensor.shape, tensor.dtype) == (sent.shape, sent.dtype) and not is_expanded(tensor)
