"""One rank of `hvdtrain lint --run`: run a script, and write down its steps and operations.

Each rank writes a file of its own, and communicates nothing beside what the script does, so that
a script that hangs leaves what each rank has done until then.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

import hvdtrain.torch as hvd
from hvdtrain.errors import HvdtrainError

_RECORDED = re.compile(
    r"(grouped_|sparse_)?(allreduce|allgather|alltoall|reducescatter|broadcast|barrier)"
)


class _Watch:
    """Writes what the script does, and ends it after so many steps."""

    def __init__(self, script: str, steps: int, folder: Path) -> None:
        self._script = script
        self._steps = steps
        self._folder = folder
        self._taken = 0
        self._depth = 0
        self._samples: list[str] = []
        self._samples_line = 0
        self._waiting: list[str] = []
        for name in filter(_RECORDED.match, hvd.__all__):
            setattr(hvd, name, self._recording(name, getattr(hvd, name)))
        register_module_forward_pre_hook(self._on_forward)
        register_module_forward_hook(self._after_forward, always_call=True)
        register_optimizer_step_post_hook(self._on_step)

    def write(self, kind: str, line: int = 0, what: str = "") -> None:
        """Append a fact; before init() there is no rank, and it is kept."""
        self._waiting.append(json.dumps([kind, self._taken, line, what]) + "\n")
        if hvd.is_initialized():
            with (self._folder / f"{hvd.rank()}.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(self._waiting)
            self._waiting = []

    def _recording(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if line := self._line():  # else another thread calls it, which no line here leads to
                self.write("operation", line, f"{name}(){_shape(*args[:1])}")
            return function(*args, **kwargs)

        return recorded

    def _on_forward(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled() and module.training:
            self._samples.append(_digest(inputs))
            self._samples_line = self._samples_line or self._line()

    def _after_forward(self, *_: object) -> None:
        self._depth -= 1

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        # Inputs by name are not seen, and may be what differs.
        samples = " ".join(self._samples) if all(self._samples) else ""
        self.write("samples", self._samples_line, samples)
        self._samples, self._samples_line = [], 0
        groups = optimizer.param_groups
        self.write("rates", self._line(), ", ".join(f"{float(group['lr'])}" for group in groups))
        self.write("weights", self._line(), _digest([group["params"] for group in groups]))
        self._taken += 1
        if self._taken == self._steps:
            sys.exit(0)

    def _line(self) -> int:
        """Return the line of the script that led here, through other files too; 0 if none did."""
        frame: FrameType | None = sys._getframe()
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


def _digest(value: object) -> str:
    found = hashlib.blake2b(digest_size=16)
    tensors = list(_tensors(value))
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().flatten()
        found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest() if tensors else ""


def _shape(value: object = None) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    return f" of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def main() -> None:
    """Run the script of the first argument for the steps of the second; write into the third."""
    script, steps, folder = sys.argv[1:]
    watch = _Watch(script, int(steps), Path(folder))
    sys.argv = [script]
    here = str(Path(__file__).parent)
    sys.path = [str(Path(script).parent), *(entry for entry in sys.path if entry != here)]
    try:
        runpy.run_path(script, run_name="__main__")
    except HvdtrainError:
        raise
    except Exception:
        watch.write("failure")
        raise


if __name__ == "__main__":
    main()
