"""Functions on the ranks of a Spark cluster, which are the tasks of a barrier stage.

It needs pyspark, and executors with this package, torch and cloudpickle. Ranks meet by the engine
gloo, or nccl if each has a GPU.
"""

from __future__ import annotations

import importlib
import itertools
import os
import runpy
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch.calls.call import RankServer, run_rank, served_call
from hvdtrain.launch.calls.call import run as run_here
from hvdtrain.launch.calls.called_rank import EXIT_NO_CALLER, OWN_GPUS
from hvdtrain.topology import format_by_rank

__all__ = ["Distributor", "run"]


def tracking_variables() -> dict[str, str]:
    """Return the variables of the active run of MLflow; none if there is no such run."""
    mlflow = sys.modules.get("mlflow")
    run = None if mlflow is None else mlflow.active_run()
    if mlflow is None or run is None:
        return {}
    return {
        "MLFLOW_TRACKING_URI": mlflow.get_tracking_uri(),
        "MLFLOW_RUN_ID": run.info.run_id,
    }


Result = TypeVar("Result")

_CALLER = "hvdtrain.spark.run()"
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 10.0
_SLOTS = "does the cluster have as many free slots, and can its hosts connect to the driver's?"


def run(
    function: Callable[..., Result],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    num_proc: int | None = None,
    *,
    start_timeout: float = 600.0,
    env: Mapping[str, str] | None = None,
) -> list[Result]:
    """Call a function on every rank of a Spark job, and return what each one returned.

    Each rank is a process that a task of a barrier stage starts. The function calls init() itself,
    or torch.distributed.init_process_group(), whose variables (RANK, WORLD_SIZE, MASTER_ADDR, ...)
    are set. What ranks print is in the logs of the executors. If a rank fails, the others end.

    Args:
        function: called on every rank; it, its arguments and its results are pickled.
        args: positional arguments.
        kwargs: keyword arguments.
        num_proc: number of ranks; by default Spark's default parallelism.
        start_timeout: seconds within which all ranks must start.
        env: environment variables of the ranks.

    Returns:
        The results, ordered by rank.

    Raises:
        Exception: the exception of the rank that failed first, with a note of its rank and
            traceback.
        UsageError: there is no SparkContext here, or pyspark or cloudpickle is missing.
        HvdtrainError: ranks did not start in time, or ended without a result.
    """
    context = _spark_context()
    np = context.defaultParallelism if num_proc is None else num_proc
    if np < 1:
        raise UsageError(f"{_CALLER}: num_proc={np} must be at least 1")
    host = context.getConf().get("spark.driver.host", "localhost")
    here = context.getConf().get("spark.driver.bindAddress", host)
    with served_call(function, args, kwargs, np, host, _CALLER, here) as call:
        variables = {**tracking_variables(), **(env or {}), **call.variables}
        stage = _Stage(context, _task(variables, np), np)
        stage.watch(call, start_timeout)
    stage.join()
    return call.results(stage.end)


def _spark_context() -> Any:
    try:
        pyspark = importlib.import_module("pyspark")
    except ImportError:
        raise UsageError(f"{_CALLER} needs Spark: pip install pyspark") from None
    context = getattr(pyspark.SparkContext, "_active_spark_context", None)
    if context is None:
        raise UsageError(
            f"{_CALLER} needs a SparkContext in this process: call SparkSession.builder"
            ".getOrCreate() before (a session of Spark Connect has none)"
        )
    return context


class _Stage:
    """The tasks that start the ranks."""

    def __init__(self, context: Any, task: Callable[..., Any], np: int) -> None:
        self.end = "its task still runs"
        self._context, self._task, self._np = context, task, np
        self._group = f"hvdtrain-{secrets.token_hex(8)}"
        # Threads of this class have a job group of their own.
        thread = importlib.import_module("pyspark.util").InheritableThread
        self._thread = thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        np = self._np
        self._context.setJobGroup(self._group, f"{_CALLER} on {np} ranks", interruptOnCancel=True)
        try:
            partitions = self._context.parallelize(range(np), np).barrier()
            codes = dict(partitions.mapPartitions(self._task).collect())
            failed = {rank: str(code) for rank, code in sorted(codes.items()) if code}
            self.end = f"exit codes: {format_by_rank(failed) or 'all 0'}"
        except Exception as error:
            self.end = _cause(error)

    def watch(self, call: RankServer, start_timeout: float) -> None:
        """Wait until all tasks have ended, or a rank has failed."""
        try:
            while self._thread.is_alive() and not call.failed:
                self._thread.join(_POLL_SECONDS)
                call.require_start(start_timeout, _SLOTS)
        except BaseException:  # Ctrl-C, for example
            self._context.cancelJobGroup(self._group)
            raise

    def join(self) -> None:
        """Wait until ranks have ended that have lost their connection."""
        self._thread.join(_GRACE_SECONDS)
        if self._thread.is_alive():  # Spark tries again, and has no slots
            self._context.cancelJobGroup(self._group)


def _cause(error: Exception) -> str:
    """Return the line with the cause in the text of an error of Spark, Python's or Java's."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    before_stack = list(itertools.takewhile(lambda line: not line.startswith("\tat "), lines))
    texts = [line for line in before_stack if not line.startswith(" ")]
    return texts[-1].removeprefix(": ") if texts else type(error).__name__


def _task(variables: Mapping[str, str], np: int) -> Callable[[Iterator[int]], Iterator[Any]]:
    """Return what each task does; it is pickled."""

    def task(partition: Iterator[int]) -> Iterator[tuple[int, int]]:
        from pyspark import BarrierTaskContext

        place = BarrierTaskContext.get()
        rank = place.partitionId()
        gpus = place.resources().get("gpu")
        visible = {}
        if gpus is not None:
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus.addresses), OWN_GPUS: "1"}
        code = run_rank({**visible, **variables}, rank, np)
        if code == EXIT_NO_CALLER:
            raise HvdtrainError(f"{_CALLER}: rank {rank} cannot connect to the driver, see its log")
        yield rank, code

    return task


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
            call = _with_variables(function, {**tracking_variables(), **hidden})
            return run_here(call, arguments, kwargs, np=self.num_processes)[0]
        results = run(function, arguments, kwargs, self.num_processes, env=hidden)
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
