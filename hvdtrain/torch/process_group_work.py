"""The operations that a group of torch.distributed has submitted, and the thread that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

Tensors = Sequence[torch.Tensor]


class SubmittedWork(Work):
    """An operation that a thread runs; waiting for it raises what it has raised."""

    def __init__(self) -> None:
        super().__init__()
        self._done: Future[list[torch.Tensor]] = Future()
        # To C++, a future with an exception from Python is one with a result. One whose callback
        # raises is an error there too: the backward pass of DDP waits in C++.
        self._future: Future[list[torch.Tensor]] = self._done.then(lambda done: done.value())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is done: hvdtrain watches ranks that are late, and ends jobs by itself."""
        self._done.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether it is done."""
        return self._done.done()

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Return the future of its results."""
        return self._future

    def run(self, operation: Callable[[], None], result: Tensors) -> None:
        """Run the operation, and wake those who wait."""
        try:
            with torch.no_grad():
                operation()
        except Exception as error:
            self._done.set_exception(error)  # type: ignore[arg-type]
        else:
            self._done.set_result(list(result))


class OperationThread:
    """Runs operations one after the other."""

    def __init__(self, name: str) -> None:
        self._name, self._count = name, 0
        self._thread = ThreadPoolExecutor(1, "hvdtrain-process-group")

    def submit(self, kind: str, run: Callable[[str], None], result: Tensors) -> SubmittedWork:
        """Run an operation after those before it, and return what waits for it."""
        self._count += 1
        name = f"{self._name}.{kind}.{self._count}"
        submitted = SubmittedWork()
        self._thread.submit(submitted.run, lambda: run(name), result)
        return submitted

    def shutdown(self) -> None:
        """Wait for what has been submitted, and take no more."""
        self._thread.shutdown()
