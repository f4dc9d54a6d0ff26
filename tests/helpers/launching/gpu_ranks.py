"""What ranks of a test on a GPU do: several share one, and every case is run, whatever fails.

Time on a GPU is scarce: a case that fails on all ranks does not keep the next ones from being run,
and one that hangs shows where.
"""

import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from job import RESULTS, rank_of
from ranks import report

_CASE_SECONDS = 100.0  # the longest of them compiles a model
_FAILED_SECONDS = 20.0  # how long a rank that has failed waits for those that have not, yet
# What a case measures, for the record: by name.
FIGURES: dict[str, float | str] = {}


def take_device(kind: str) -> torch.device:
    """Return the device of this rank, before it joins the others; ranks may share a GPU.

    NCCL refuses two ranks on one GPU of one host: each says that it is a host.
    """
    if kind == "cpu":
        return torch.device(kind)
    rank, count = rank_of(os.environ) or 0, torch.cuda.device_count()
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    device = torch.device(kind, rank % count)
    torch.cuda.set_device(device)
    return device


def device() -> torch.device:
    """Return that on which tensors are made here."""
    return torch.empty(0).device


def busy() -> None:
    """Keep the current stream busy for a while, so that what does not wait for it is seen."""
    if device().type == "cuda":
        torch.cuda._sleep(20_000_000)


def run_cases(cases: Sequence[Callable[[], object]], rank: int, size: int) -> None:
    """Run all cases; report those that failed, and what was measured (collective)."""
    failed = {}
    FIGURES["cases"] = len(cases)
    for case in cases:
        faulthandler.dump_traceback_later(_CASE_SECONDS, exit=True)
        text = _failure(case)
        if text:
            print(f"[rank {rank}/{size}] {case.__name__}: {text}", file=sys.stderr, flush=True)
            failed[case.__name__] = text.strip().splitlines()[-1]
        _meet(case.__name__, rank, size, _FAILED_SECONDS if text else _CASE_SECONDS)
    faulthandler.cancel_dump_traceback_later()
    report(cases=len(cases), payload={"failed": failed, "figures": FIGURES})


def _failure(case: Callable[[], object]) -> str:
    try:
        case()
    except Exception:
        return traceback.format_exc()
    return ""


def _meet(name: str, rank: int, size: int, seconds: float) -> None:
    """Wait for all ranks without what is tested, which may be broken now; end if they hang."""
    deadline = time.monotonic() + seconds
    folder = Path(os.environ[RESULTS]) / "met" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(rank)).touch()
    while len(list(folder.iterdir())) < size:
        if time.monotonic() > deadline:
            print(f"[rank {rank}/{size}] {name}: other ranks hang", file=sys.stderr, flush=True)
            os._exit(1)
        time.sleep(0.001)
