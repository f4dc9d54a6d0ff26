"""One rank of `hvdtrain lint --run`: run a script, and write down its steps and operations.

Each rank writes a file of its own, and communicates nothing beside what the script does, so that
a script that hangs leaves what each rank has done until then.
"""

from __future__ import annotations

import functools
import hashlib
import json
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

import hvdtrain.torch as hvd
from hvdtrain.errors import HvdtrainError

_RECORDED = (
    *("allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "grouped_allreduce"),
    *("grouped_allreduce_", "allgather", "allgather_async", "allgather_object", "broadcast"),
    *("broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object", "alltoall"),
    *("broadcast_parameters", "broadcast_optimizer_state", "reducescatter", "barrier"),
)


class _Watch:
    """Writes what the script does, and ends it after so many steps."""

    def __init__(self, script: str, steps: int, folder: Path) -> None:
        self._script = script
        self._left = steps
        self._folder = folder
        self._depth = 0
        self._samples: list[str] = []
        self._samples_line = 0
        self._has_unseen = False
        self._waiting: list[str] = []

    def install(self) -> None:
        """Have torch and hvdtrain.torch tell this object what they do."""
        for name in _RECORDED:
            setattr(hvd, name, self._recording(name, getattr(hvd, name)))
        register_module_forward_pre_hook(self._on_forward)
        register_module_forward_hook(self._after_forward, always_call=True)
        register_optimizer_step_post_hook(self._on_step)

    def write(self, **event: object) -> None:
        """Append an event; before init() there is no rank, and it is kept."""
        self._waiting.append(json.dumps(event))
        if hvd.is_initialized():
            with (self._folder / f"{hvd.rank()}.jsonl").open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in self._waiting))
            self._waiting = []

    def _recording(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            line = self._line()
            if line:  # else another thread calls it, to which no line of the script leads
                shape = _shape(args[0]) if args else ""
                self.write(event="operation", name=name, shape=shape, line=line)
            return function(*args, **kwargs)

        return recorded

    def _on_forward(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        self._depth += 1
        if self._depth > 1 or not (torch.is_grad_enabled() and module.training):
            return
        tensors = list(_tensors(inputs))
        if tensors:
            self._samples.append(_digest(tensors))
            self._samples_line = self._samples_line or self._line()
        else:  # inputs by name are not seen here, and may be what differs
            self._has_unseen = True

    def _after_forward(self, *_: object) -> None:
        self._depth -= 1

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        groups = optimizer.param_groups
        weights = _digest([parameter for group in groups for parameter in group["params"]])
        is_known = bool(self._samples) and not self._has_unseen
        samples = " ".join(self._samples) if is_known else None
        samples_line = self._samples_line
        self._samples, self._samples_line, self._has_unseen = [], 0, False
        self.write(
            event="step",
            line=self._line(),
            weights=weights,
            rates=[float(group["lr"]) for group in groups],
            samples=samples,
            samples_line=samples_line,
        )
        self._left -= 1
        if self._left == 0:
            sys.exit(0)

    def _line(self) -> int:
        """Return the line of the script that led here, through other files too; 0 if none did."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename == self._script:
                return frame.f_lineno
            frame = frame.f_back
        return 0


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in an input, those in lists and dictionaries included."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


def _digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().flatten()
        found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _shape(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def main() -> None:
    """Run the script of the first argument for the steps of the second; write into the third."""
    script, steps, folder = sys.argv[1:]
    watch = _Watch(script, int(steps), Path(folder))
    watch.install()
    sys.argv = [script]
    sys.path[0] = str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except HvdtrainError:
        raise
    except Exception:
        watch.write(event="failure")
        raise


if __name__ == "__main__":
    main()
