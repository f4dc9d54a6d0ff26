"""Broadcast of models, optimizers and Python objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hvdtrain.core import objects
from hvdtrain.core.process_set import ProcessSet, channel_of, global_process_set
from hvdtrain.torch.operations.broadcast import broadcast_, broadcast_async_
from hvdtrain.torch.operations.divergence import note_broadcast

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


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


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor] | torch.Tensor],
    root_rank: int = 0,
) -> None:
    """Overwrite parameters and buffers with those of `root_rank` (collective).

    Args:
        params: `model.state_dict()`, `model.named_parameters()` or tensors; entries that are not
            tensors are ignored. The order of names may differ between ranks.
        root_rank: rank whose values are sent.

    Raises:
        MismatchError: shapes or dtypes differ between ranks.
        ValueError: `params` is none of these.
    """
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ValueError(
            "broadcast_parameters takes model.state_dict(), model.named_parameters() or a list of "
            f"tensors, got {type(params).__name__}"
        )
    items = params.items() if isinstance(params, Mapping) else params
    pairs = [(None, item) if isinstance(item, torch.Tensor) else item for item in items]
    handles = [
        broadcast_async_(tensor, root_rank, name)
        for name, tensor in pairs
        if isinstance(tensor, torch.Tensor)
    ]
    for handle in handles:
        handle.wait()
    note_broadcast(tensor for _, tensor in pairs if isinstance(tensor, torch.Tensor))


@dataclass(frozen=True)
class _TensorSpec:
    """Placeholder of a tensor of the root rank, which is sent separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Overwrite the optimizer's state and settings with those of `root_rank` (collective).

    State that only the root rank has is created on the other ranks without taking a step.

    Args:
        optimizer: torch optimizer or DistributedOptimizer over the same parameters in the same
            groups on every rank.
        root_rank: rank whose state is sent.
        model: accepted for compatibility with Horovod; not used.

    Raises:
        ValueError: the numbers of parameters differ from those on the root rank.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    number = {id(parameter): index for index, parameter in enumerate(parameters)}
    state = {number[id(p)]: entry for p, entry in optimizer.state.items()}
    counts = [len(group["params"]) for group in optimizer.param_groups]
    settings = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    outline = {
        index: {key: _outline(value) for key, value in entry.items()}
        for index, entry in state.items()
    }
    outline, settings, theirs = broadcast_object(
        (outline, settings, counts), root_rank, "optimizer state"
    )
    if counts != theirs:
        raise ValueError(
            f"this optimizer's groups have {counts} parameters, but rank {root_rank}'s have "
            f"{theirs}"
        )
    received: dict[torch.Tensor, dict[str, Any]] = {}
    for index, entry in outline.items():
        mine = state.get(index, {})
        received[parameters[index]] = {
            key: _receive(value, mine.get(key), parameters[index].device, root_rank, key)
            for key, value in entry.items()
        }
    optimizer.state.clear()
    optimizer.state.update(received)
    for group, sent in zip(optimizer.param_groups, settings, strict=True):
        group.update(sent)


def _outline(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _TensorSpec(tuple(value.shape), value.dtype, value.device.type == "cpu")


def _receive(value: Any, mine: Any, device: torch.device, root_rank: int, name: str) -> Any:
    if not isinstance(value, _TensorSpec):
        return value
    fits = (
        isinstance(mine, torch.Tensor) and mine.shape == value.shape and mine.dtype == value.dtype
    )
    if not fits:
        target = torch.device("cpu") if value.on_host else device
        mine = torch.empty(value.shape, dtype=value.dtype, device=target)
    return broadcast_(mine, root_rank, name)
