"""The training state with torch: weights, optimizer, loss scaler and averaged weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from hvdtrain.errors import UnsupportedError, UsageError
from hvdtrain.torch.operations.parts import is_expanded, parameters_of, require_values
from hvdtrain.train.checkpoints import TensorLibrary, flatten, holds, unflatten
from hvdtrain.train.loop.protocol import Array
from hvdtrain.train.loop.replica_check import multipliers, number_checksum, words_checksum

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
        for device, chosen in by_device.items():
            factors, rows = _multipliers(device), _ROWS_AT_A_TIME.get(device.type, _MANY_ROWS)
            # One after the other: the words of some tensors are copies.
            sums = torch.stack([words_checksum(_words(tensors[i]), factors, rows) for i in chosen])
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


@cache
def _multipliers(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(multipliers()).to(device)


class TorchTrainingState:
    """A model, its optimizer, and what else belongs to the state of a run."""

    tensor_library: TensorLibrary = "pt"

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        self._model, self._optimizer, self._extras = model, optimizer, dict(extras or {})
        self._memory: dict[str, torch.Tensor] = {}
        self._complete: Callable[[], None] = lambda: None  # of the last snapshot

    def weights(self) -> dict[str, Array]:
        """Return all parameters and buffers by name; types that numpy lacks as integers."""
        state = self._model.state_dict()
        return {n: _array(value) for n, value in state.items() if isinstance(value, torch.Tensor)}

    def reserve(self) -> None:
        """Allocate the memory of snapshots now, so that the first is as fast as the others.

        It needs as much memory as weights, optimizer state and extras. Call it on the rank that
        saves, once the optimizer has taken a step.
        """
        content = self._content()
        require_savable(content)
        tensors, _ = flatten(content)
        for memory in self._memory_for(tensors).values():
            memory.zero_()  # the system allocates pages when they are written

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Note the current state, and return what returns its content.

        What a forward pass may change is copied at once. Trained weights, the optimizer's state for
        each of them, and averaged weights are copied when the content is asked for, in a thread
        while the next gradients are computed: call settle() before they change. The memory is that
        of the snapshot before, which must not be needed any more.
        """
        self.settle()
        content = self._content()
        tensors, skeleton = flatten(content)
        copies, lock = self._memory_for(tensors), threading.Lock()
        later = self._unchanged_until_step(content["optimizer"]["state"])
        waiting = []
        for name, tensor in tensors.items():
            if tensor.data_ptr() in later:
                waiting.append((copies[name], tensor))
            else:
                copy_tensor(copies[name], tensor)

        def complete() -> None:
            with lock:  # of the thread that saves and that which trains
                while waiting:
                    copy_tensor(*waiting[-1])
                    waiting.pop()

        def read() -> dict[str, Any]:
            complete()
            found: dict[str, Any] = unflatten(skeleton, copies)
            return found

        self._complete = complete
        return read

    def settle(self) -> None:
        """Wait until weights, optimizer state and averaged weights may change."""
        self._complete()
        self._complete = lambda: None  # without what the snapshot holds

    def load(self, content: Mapping[str, Any]) -> None:
        _require_optimizer(content["optimizer"], self._optimizer)
        saved = content["extras"]
        if saved.keys() != self._extras.keys():
            found, wanted = (", ".join(sorted(kept)) or "none" for kept in (saved, self._extras))
            raise ValueError(
                f"of ema and scaler it has {found}, and this run {wanted}: give --ema and --amp as "
                "before"
            )
        self._load_optimizer(content["optimizer"])
        self.load_weights(content)

    def load_weights(self, content: Mapping[str, Any]) -> None:
        self.settle()
        self._model.load_state_dict(content["model"])
        for name, extra in self._extras.items():
            extra.load_state_dict(content["extras"][name])

    def optimizer_state(self) -> Mapping[Any, Any]:
        return self._optimizer.state_dict()["state"]  # type: ignore[no-any-return]

    def load_optimizer(self, state: Mapping[Any, Any]) -> None:
        self._load_optimizer({**self._optimizer.state_dict(), "state": state})

    def _load_optimizer(self, saved: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(saved)
        # torch gives state the type of its parameter, whatever type the optimizer keeps it in.
        for number, parameter in enumerate(parameters_of(self._optimizer)):
            entry, own = saved["state"].get(number), self._optimizer.state.get(parameter)
            if not (isinstance(entry, Mapping) and isinstance(own, dict)):
                continue
            for name, value in entry.items():
                known = own.get(name)
                if not (isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor)):
                    continue
                if known.dtype != value.dtype:
                    own[name] = value.to(known.device, copy=True)

    def _content(self) -> dict[str, Any]:
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "extras": {name: extra.state_dict() for name, extra in self._extras.items()},
        }

    def _memory_for(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return memory for copies of tensors, reusing the memory of before if it fits."""
        known, self._memory = self._memory, {}
        for name, tensor in tensors.items():
            memory = known.get(name)
            if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
                memory = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda"
                )
            self._memory[name] = memory
        return self._memory

    def _unchanged_until_step(self, states: Mapping[Any, Any]) -> set[int]:
        """Return the addresses of tensors in host memory that only optimizer steps change."""
        averages = [e for e in self._extras.values() if isinstance(e, AveragedModel)]
        values = (v for s in states.values() if isinstance(s, Mapping) for v in s.values())
        tensors = chain(
            (p for p in self._model.parameters() if p.requires_grad),
            *(average.parameters() for average in averages),
            (v for v in values if isinstance(v, torch.Tensor) and v.ndim),
        )
        return {tensor.data_ptr() for tensor in tensors if tensor.device.type == "cpu"}


def _array(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    elif tensor.dtype.itemsize == 1 and tensor.is_floating_point():
        tensor = tensor.view(torch.int8)
    array: Array = tensor.numpy()
    return array


def require_savable(content: Mapping[str, Any]) -> None:
    """Check that a checkpoint can hold a state."""
    try:
        _require_values(content, ())
        tensors, _ = flatten(content)
    except (TypeError, UnsupportedError) as error:
        raise UsageError(str(error)) from error
    for name, tensor in tensors.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout is not torch.strided:
            kind = f"{str(tensor.layout).removeprefix('torch.')} of {kind}"
        elif holds(kind) and not is_expanded(tensor):
            continue
        elif is_expanded(tensor):
            kind = f"expanded {kind}"
        instead = "register the buffer with persistent=False and make it in the recipe"
        if name.startswith("optimizer/"):
            instead = (
                "take an optimizer with dense state, such as SparseAdam or SGD without momentum"
            )
        raise UsageError(
            f"{name} is {kind}, which a checkpoint cannot hold: store it as dense tensors of "
            f"another type, or {instead}"
        )


def _require_values(value: Any, path: tuple[str, ...]) -> None:
    if isinstance(value, torch.Tensor):
        require_values(value, "/".join(path))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _require_values(item, (*path, str(key)))


def _require_optimizer(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Check what load_state_dict() does not check, and the next step needs."""
    own = optimizer.state_dict()["param_groups"]
    for group, expected in zip(saved["param_groups"], own, strict=True):
        for name, value in expected.items():
            if name not in group or not _is_like(group[name], value):
                raise ValueError(f"its optimizer has no proper {name}")
    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    for number, state in saved["state"].items():
        if not isinstance(number, int) or not isinstance(state, Mapping):
            continue  # of no parameter
        shape = parameters[number].shape
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape not in (shape, torch.Size([])):
                raise ValueError(f"its optimizer's {name} has shape {tuple(value.shape)}")


def _is_like(value: object, expected: object) -> bool:
    """Return whether a setting may replace another; None stands for an optional setting."""
    if isinstance(expected, float):
        return isinstance(value, (int, float))
    return expected is None or isinstance(value, type(expected))


def copy_tensor(copy: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor into contiguous memory; waits for the device."""
    if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel():
        # torch would start a thread pool for each new thread that calls it.
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        copy.reshape(-1).view(torch.uint8).numpy()[:] = flat.numpy()
    else:
        copy.copy_(tensor.detach())
