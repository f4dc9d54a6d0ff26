"""Broadcast of models, optimizers and Python objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from hvdtrain.collective import collective
from hvdtrain.core import context, objects
from hvdtrain.core.process_set import ProcessSet, channel_of, global_process_set
from hvdtrain.errors import MismatchError, UnsupportedError
from hvdtrain.torch.operations.divergence import note_broadcast
from hvdtrain.torch.state import broadcast_state, broadcast_stateful, overwrite_tensors
from hvdtrain.torch.tensors.parts import parameters_of

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
    note_broadcast(overwrite_tensors(_named(params), root_rank, "broadcast_parameters"))


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
    note_broadcast(tensor for tensor in own.values() if isinstance(tensor, torch.Tensor))


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
