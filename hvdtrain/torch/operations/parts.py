"""The dense tensors that any tensor's memory consists of, in types that engines know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hvdtrain.core import objects
from hvdtrain.errors import UnsupportedError
from hvdtrain.torch.operations.routes import is_communicated

if TYPE_CHECKING:
    from hvdtrain.core.gradients.step_info import WeightSums


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def rate_of(optimizer: torch.optim.Optimizer) -> float | None:
    """Return the learning rate of the first parameter group, if there is one."""
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None else float(rate)


def check_reduced(optimizer: torch.optim.Optimizer, reduced: Sequence[torch.nn.Parameter]) -> None:
    """Check that the gradients of all trainable parameters are reduced."""
    hooked = {id(parameter) for parameter in reduced}
    for number, parameter in enumerate(parameters_of(optimizer)):
        if parameter.requires_grad and id(parameter) not in hooked:
            raise RuntimeError(
                f"parameter {number} of the optimizer (shape {tuple(parameter.shape)}) was frozen "
                "when DistributedOptimizer was created or add_param_group() was last called, or is "
                "new in the optimizer: add it with add_param_group(), or wrap the optimizer again"
            )


@torch.no_grad()
def weight_sums(named: Iterable[tuple[str, torch.nn.Parameter]]) -> WeightSums:
    """Return what ranks compare of parameters; those that are not plain tensors are left out."""
    from hvdtrain.core.gradients.step_info import MOST_ELEMENTS, sum_weights

    rows = []
    for name, parameter in named:
        if parameter.layout is torch.strided and not is_traceable_wrapper_subclass(parameter):
            part = parameter.detach().flatten()[:MOST_ELEMENTS]
            part = part.resolve_conj().resolve_neg()
            values = torch.view_as_real(part).flatten() if part.is_complex() else part
            rows.append((name, values.float().cpu().numpy(), part.dtype.itemsize))
    return sum_weights(rows)


def name_parameters(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
) -> dict[int, str]:
    """Return the names of the optimizer's parameters, by id(parameter)."""
    parameters = parameters_of(optimizer)
    if named_parameters is None:
        return {id(p): f"allreduce.noname.{number}" for number, p in enumerate(parameters)}
    named = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in named):
        raise ValueError(
            "named_parameters must yield tuples (name, parameter): pass model.named_parameters()"
        )
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ValueError(f"named_parameters has names used twice: {', '.join(twice)}")
    names = {id(p): name for name, p in named}
    unnamed = sum(id(p) not in names for p in parameters)
    if unnamed:
        raise ValueError(
            f"named_parameters leaves {unnamed} of the optimizer's {len(parameters)} parameters "
            "without a name: pass model.named_parameters()"
        )
    return names


_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)
_LAYOUTS = (torch.strided, torch.sparse_coo, *_BY_ROWS, *_BY_COLUMNS)
# Types of the same width that every engine and pickle know.
_SAME_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Engines know them, and pickle does not.
_WITHOUT_PICKLE = (torch.uint16, torch.uint32, torch.uint64)


def require_values(tensor: torch.Tensor, subject: str) -> None:
    if is_lazy(tensor):
        raise UnsupportedError(
            f"{subject} has no values yet, because its module is lazy: run one batch through the "
            "model first, on every rank"
        )
    if tensor.is_meta:
        raise UnsupportedError(
            f"{subject} is on the meta device, where tensors have no values: call "
            "model.to_empty(device=...) and initialize it first, on every rank"
        )


def describe_tensor(tensor: torch.Tensor, subject: str) -> str:
    """Return what must be equal in tensors that overwrite each other."""
    require_values(tensor, subject)
    wrapped = is_traceable_wrapper_subclass(tensor)
    if wrapped or tensor.layout not in _LAYOUTS or tensor.is_nested:
        raise UnsupportedError(
            f"{subject} is a {type(tensor).__name__} of {tensor.layout}, which cannot be "
            "overwritten in place: model.load_state_dict(hvd.broadcast_object(model.state_dict()))"
        )
    text = f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.")
    if tensor.is_quantized:
        return f"{text} {_quantizer(tensor)}"
    if tensor.layout is torch.strided:
        return text + "".join(f", expanded in dimension {dim}" for dim in _expanded(tensor))
    shapes = ", ".join(str(tuple(part.shape)) for part in parts_of(tensor))
    ordered = tensor.layout is not torch.sparse_coo or tensor.is_coalesced()
    layout = str(tensor.layout).removeprefix("torch.")
    return f"{layout} {text} of parts {shapes}{'' if ordered else ', not coalesced'}"


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return dense tensors over the memory of a tensor, of types that engines know."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in _BY_ROWS:
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in _BY_COLUMNS:
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        parts = [tensor]
    return [_plain(part) for part in parts]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_quantized:
        memory, width = tensor.untyped_storage(), _SAME_WIDTH[tensor.dtype.itemsize]
        bare = torch.empty(0, dtype=width, device=tensor.device)
        return bare.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
    if not is_communicated(tensor.dtype):
        tensor = tensor.view(_SAME_WIDTH[tensor.dtype.itemsize])
    for dim in _expanded(tensor):  # whose elements are one in memory
        tensor = tensor.narrow(dim, 0, 1)
    return tensor


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether elements of a dense tensor share their memory."""
    return bool(_expanded(tensor))


def _expanded(tensor: torch.Tensor) -> list[int]:
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    return [dim for dim, (stride, length) in enumerate(strides) if stride == 0 and length > 1]


def _quantizer(tensor: torch.Tensor) -> str:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"scale {tensor.q_scale()} zero point {tensor.q_zero_point()}"
    scales, points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    axis = tensor.q_per_channel_axis()
    return f"scales {scales.tolist()} zero points {points.tolist()} of dimension {axis}"


def _reduce(tensor: torch.Tensor) -> Any:
    """Return how a tensor is pickled, also of types that torch pickles in files only."""
    strided = tensor.layout is torch.strided and not tensor.is_quantized
    unknown = not is_communicated(tensor.dtype) or tensor.dtype in _WITHOUT_PICKLE
    if strided and unknown and not tensor.is_meta:
        return _viewed, (tensor.detach().view(_SAME_WIDTH[tensor.dtype.itemsize]), tensor.dtype)
    return tensor.__reduce_ex__(4)


def _viewed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.view(dtype)


objects.reducers[torch.Tensor] = _reduce
