"""Functions on the ranks of a Ray cluster, which actors start, one each.

It needs ray, and nodes with this package, torch and cloudpickle. Ranks meet by the engine gloo, or
nccl if each has a GPU.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch.calls.call import RankServer, run_rank, served_call
from hvdtrain.launch.calls.called_rank import OWN_GPUS
from hvdtrain.topology import format_by_rank

__all__ = ["run"]

Result = TypeVar("Result")

_CALLER = "hvdtrain.ray.run()"
_POLL_SECONDS = 0.1
_END_SECONDS = 10.0


def run(
    function: Callable[..., Result],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    num_workers: int = 1,
    *,
    resources: Mapping[str, float] | None = None,
    start_timeout: float = 600.0,
    env: Mapping[str, str] | None = None,
) -> list[Result]:
    """Call a function on every rank of a Ray job, and return what each one returned.

    Each rank is a process that an actor starts. The function calls init() itself, or
    torch.distributed.init_process_group(), whose variables (RANK, WORLD_SIZE, MASTER_ADDR, ...)
    are set. If a rank fails, the others end. Ray is started here if this process is not connected
    to one.

    Args:
        function: called on every rank; it, its arguments and its results are pickled.
        args: positional arguments.
        kwargs: keyword arguments.
        num_workers: number of ranks.
        resources: what Ray reserves for each rank, as in {"CPU": 4, "GPU": 1}; by default one CPU.
        start_timeout: seconds within which all ranks must start.
        env: environment variables of the ranks.

    Returns:
        The results, ordered by rank.

    Raises:
        Exception: the exception of the rank that failed first, with a note of its rank and
            traceback.
        UsageError: ray or cloudpickle is missing.
        HvdtrainError: ranks did not start in time, or ended without a result.
    """
    if num_workers < 1:
        raise UsageError(f"{_CALLER}: num_workers={num_workers} must be at least 1")
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise UsageError(f"{_CALLER} needs Ray: pip install ray") from None
    if not ray.is_initialized():
        ray.init()
    deadline = time.monotonic() + start_timeout
    host = ray.util.get_node_ip_address()
    bundles = [dict(resources or {"CPU": 1})] * num_workers
    with (
        _reserved(ray, bundles, start_timeout) as group,
        served_call(function, args, kwargs, num_workers, host, _CALLER) as server,
        ExitStack() as actors,
    ):
        codes = []
        for rank, bundle in enumerate(bundles):
            actor = _actor(ray, group, rank, bundle)
            actors.callback(ray.kill, actor)
            own = {OWN_GPUS: "1"} if bundle.get("GPU") else {}
            variables = {**(env or {}), **server.variables, **own}
            codes.append(actor.run.remote(variables, rank, num_workers))
        ends = _watch(ray, codes, server, deadline - time.monotonic())
    return server.results(ends or "their actors returned")


@contextmanager
def _reserved(
    ray: Any, bundles: Sequence[Mapping[str, float]], limit_seconds: float
) -> Iterator[Any]:
    """Reserve the resources of all ranks at once, else two jobs could each wait for the other."""
    group = ray.util.placement_group(list(bundles), strategy="PACK")
    try:
        if not group.wait(limit_seconds):
            raise HvdtrainError(
                f"{_CALLER}: Ray could not provide {len(bundles)} times {bundles[0]} within "
                f"{limit_seconds:g} s: ask for fewer ranks or resources, or add nodes"
            )
        yield group
    finally:
        ray.util.remove_placement_group(group)


def _actor(ray: Any, group: Any, rank: int, bundle: Mapping[str, float]) -> Any:
    scheduling = importlib.import_module("ray.util.scheduling_strategies")
    options = ray.remote(_Rank).options(
        num_cpus=bundle.get("CPU", 0),
        num_gpus=bundle.get("GPU", 0),
        resources={name: n for name, n in bundle.items() if name not in ("CPU", "GPU")},
        scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=rank
        ),
    )
    return options.remote()


def _watch(ray: Any, codes: Sequence[Any], server: RankServer, limit_seconds: float) -> str:
    """Wait until all ranks have ended, or one has failed; return how ranks ended badly."""
    left, ends, until = list(codes), dict[int, str](), math.inf
    while left and not ends and time.monotonic() < until:
        ended, left = ray.wait(left, num_returns=len(left), timeout=_POLL_SECONDS)
        pairs = ((codes.index(code), _bad_end(ray, code)) for code in ended)
        ends |= {rank: end for rank, end in pairs if end}
        if server.lost:
            # Ray tells how a rank has ended later than its connection closes.
            until = min(until, time.monotonic() + _END_SECONDS)
        elif server.failed:
            break
        else:
            server.require_start(limit_seconds, "what do the logs of Ray's nodes say?")
    return format_by_rank(ends)


def _bad_end(ray: Any, code: Any) -> str:
    """Return how a rank has ended, or "" if it ended well."""
    try:
        number = ray.get(code)
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        return text.splitlines()[0]
    return f"exit code {number}" if number else ""


class _Rank:
    """Runs a rank; an actor."""

    def run(self, variables: Mapping[str, str], rank: int, size: int) -> int:
        """Run it in a process of its own, and return its exit code."""
        return run_rank(variables, rank, size)
