"""Checksums of everything that must be equal on every rank, computed on the tensors' devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import torch

from hvdtrain.train.loop.checksum import ROW_WORDS, SHIFT, multipliers, number_checksum

# Rows copied temporarily at a time: on a CPU as many as fit into its caches, elsewhere as many as
# keep the device busy.
_ROWS_AT_A_TIME = {"cpu": 1}
_MANY_ROWS = 128


def torch_checksums(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    numbers: Mapping[str, float] | None = None,
) -> dict[str, int]:
    """Return the checksums of weights, optimizer state and learning rates by name.

    Buffers are excluded: the running statistics of batch normalization depend on a rank's own
    samples, and differ. So is the state of an optimizer whose work ranks share: each element has
    one owner.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors: dict[str, torch.Tensor] = {
        f"weight {name!r}": parameter for name, parameter in model.named_parameters()
    }
    found = dict(numbers or {})
    shared = getattr(optimizer, "sharded", False)
    states = {} if optimizer is None or shared else optimizer.state
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        for parameter in group["params"]:
            name = repr(names.get(id(parameter), f"parameter of group {number}"))
            for key, value in states.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
                    continue
                if isinstance(value, torch.Tensor) and value.ndim:
                    tensors[f"{key} of {name}"] = value
                elif isinstance(value, (torch.Tensor, int, float)):
                    found[f"{key} of {name}"] = float(value)
        found[f"learning rate of group {number}"] = float(group["lr"])
    checksums = dict(zip(tensors, tensor_checksums(list(tensors.values())), strict=True))
    return checksums | {name: number_checksum(value) for name, value in found.items()}


def tensor_checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return array_checksum() of each tensor, waiting once for each device."""
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    checksums = [0] * len(tensors)
    with torch.no_grad():
        for chosen in by_device.values():
            sums = torch.stack([_checksum(_words(tensors[index])) for index in chosen])
            for index, checksum in zip(chosen, sums.tolist(), strict=True):
                checksums[index] = checksum
    return checksums


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as 64-bit words, padded with zeros, int64 [words]."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    nbytes, offset = flat.numel() * flat.itemsize, flat.storage_offset() * flat.itemsize
    if nbytes and nbytes % 8 == 0 and offset % 8 == 0:
        return flat.view(torch.int64)
    words = torch.zeros(-(-nbytes // 8), dtype=torch.int64, device=flat.device)
    words.view(flat.dtype)[: flat.numel()] = flat
    return words


def _checksum(words: torch.Tensor) -> torch.Tensor:
    """Return the checksum of words, int64 []."""
    sums = list(_row_sums(words))
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=words.device)
    rows = torch.cat(sums)
    return rows[0] if len(rows) == 1 else _checksum(rows)


def _row_sums(words: torch.Tensor) -> Iterator[torch.Tensor]:
    factors = _multipliers(words.device)
    whole = words.numel() // ROW_WORDS * ROW_WORDS
    if whole:
        at_a_time = _ROWS_AT_A_TIME.get(words.device.type, _MANY_ROWS)
        for rows in torch.split(words[:whole].view(-1, ROW_WORDS), at_a_time):
            yield _sums(rows, factors)
    if whole < words.numel():
        rest = words[whole:]
        yield _sums(rest.unsqueeze(0), factors[: rest.numel()])


def _sums(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    mixed = rows >> SHIFT
    mixed ^= rows
    mixed *= factors
    return mixed.sum(dim=1)


@cache
def _multipliers(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(multipliers()).to(device)
