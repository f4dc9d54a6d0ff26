"""Broadcast of models, optimizers and Python objects."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hvdtrain.collective import collective
from hvdtrain.core import context, objects
from hvdtrain.core.process_set import ProcessSet, channel_of, global_process_set
from hvdtrain.errors import HvdtrainError, MismatchError, UnsupportedError
from hvdtrain.torch.operations.divergence import note_broadcast
from hvdtrain.torch.state import overwrite_tensors, receive, send_outline
from hvdtrain.torch.tensors.parameters import parameters_of

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
        UnsupportedError: a tensor is of a lazy module that has not run, or on the meta device.
        ValueError: `params` is none of these, or has a name twice.
    """
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ValueError(
            "broadcast_parameters takes model.state_dict(), model.named_parameters() or a list of "
            f"tensors, got {type(params).__name__}"
        )
    items = params.items() if isinstance(params, Mapping) else params
    pairs = [(None, item) if isinstance(item, torch.Tensor) else item for item in items]
    named: dict[str, Any] = {}
    for number, (name, value) in enumerate(pairs):
        key = f"tensor {number}" if name is None else str(name)
        if key in named:
            raise ValueError(
                f"broadcast_parameters: two entries are called {key!r}, as in two models: call it "
                "once for each model"
            )
        named[key] = value
    overwrite_tensors(named, root_rank, "broadcast_parameters")
    note_broadcast(tensor for _, tensor in pairs if isinstance(tensor, torch.Tensor))


@collective
def broadcast_module(module: torch.nn.Module, root_rank: int = 0) -> None:
    """Load the state of `root_rank` into a module, extra states included."""
    own = module.state_dict()
    outline = send_outline(own, root_rank, "state of a module")
    state = receive(outline, own, torch.device("cpu"), root_rank, "state of a module")
    here, problem = context.current().topology, None
    if here.rank != root_rank:
        try:
            loaded = copy.copy(own)  # with the versions of its modules
            loaded.clear()
            loaded.update(state)
            module.load_state_dict(loaded)
        except Exception as error:  # of the user's module, too: the others wait for this rank
            text = " ".join(str(error).split())
            problem = UnsupportedError(f"{here.title} state of a module: {text}")
    objects.raise_together(problem, "state of a module")
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
    parameters = parameters_of(optimizer)
    number = {id(parameter): index for index, parameter in enumerate(parameters)}
    state: dict[int, Any] = {}
    others: dict[Any, Any] = {}
    problem: HvdtrainError | None = None
    mine: dict[Any, Any] = optimizer.state
    for key, value in mine.items():
        if id(key) in number:
            state[number[id(key)]] = value
        else:
            others[key] = value
        if isinstance(key, torch.Tensor) and id(key) not in number:
            problem = UnsupportedError(
                f"{here.title} {operation}: the optimizer has state for a tensor of shape "
                f"{tuple(key.shape)} that is none of its parameters: remove it from optimizer.state"
            )
    counts = [len(group["params"]) for group in optimizer.param_groups]
    theirs = broadcast_object(counts, root_rank, operation)
    if counts != theirs:
        problem = MismatchError(
            f"{here.title} {operation}: this optimizer's groups have {counts} parameters, but rank "
            f"{root_rank}'s have {theirs}"
        )
    settings = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    own = {"settings": settings, "others": others, "state": state}
    sent = send_outline(own, root_rank, operation, problem)
    devices = [parameter.device for parameter in parameters]
    settings, others = (
        receive(sent[name], own[name], devices[0], root_rank, name)
        for name in ("settings", "others")
    )
    received = {
        parameters[index]: receive(
            entry, state.get(index), devices[index], root_rank, f"state of parameter {index}"
        )
        for index, entry in sent["state"].items()
    }
    optimizer.state.clear()
    optimizer.state.update({**others, **received})
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)
