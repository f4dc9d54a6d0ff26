"""A class with the interface of pyspark's TorchDistributor, for functions and scripts."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.launch.calls.call import run as run_here
from hvdtrain.spark.job import run as run_on_spark

__all__ = ["Distributor"]


class Distributor:
    """Runs a function or a script on ranks, as pyspark.ml.torch.distributor.TorchDistributor does.

    Args:
        num_processes: number of ranks.
        local_mode: whether ranks are processes of the driver's host, under mpirun, instead of tasks
            of the cluster.
        use_gpu: whether each rank uses a GPU; on the cluster each task must have one.
    """

    def __init__(
        self, num_processes: int = 1, local_mode: bool = True, use_gpu: bool = True
    ) -> None:
        if num_processes < 1:
            raise UsageError(f"Distributor: num_processes={num_processes} must be at least 1")
        self.num_processes, self.local_mode, self.use_gpu = num_processes, local_mode, use_gpu

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Call the function on every rank, or run the script, and return rank 0's result.

        Args:
            train_object: function; or path of a script that all hosts have, which gets `args` as
                its arguments.
            *args: positional arguments.
            **kwargs: keyword arguments of a function.

        Returns:
            What the function returned on rank 0; None for a script.

        Raises:
            Exception: the exception of the rank that failed first.
            UsageError: as run() of this package; or a script has keyword arguments.
            HvdtrainError: ranks ended without a result.
        """
        function: Callable[..., Any] = _run_script
        arguments = args
        if callable(train_object):
            function = train_object
        elif kwargs:
            raise UsageError("Distributor: a script takes no keyword arguments, only words")
        else:
            arguments = (os.path.abspath(train_object), args)
        hidden = {} if self.use_gpu else {"CUDA_VISIBLE_DEVICES": ""}
        if self.local_mode:
            call = _with_variables(function, hidden)
            return run_here(call, arguments, kwargs, np=self.num_processes)[0]
        results = run_on_spark(function, arguments, kwargs, self.num_processes, env=hidden)
        return results[0]


def _with_variables(function: Callable[..., Any], variables: dict[str, str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        os.environ.update(variables)
        return function(*args, **kwargs)

    return call


def _run_script(path: str, words: tuple[object, ...]) -> None:
    sys.argv = [path, *map(str, words)]
    sys.path.insert(0, os.path.dirname(path))  # as `python script.py` has it
    runpy.run_path(path, run_name="__main__")
