"""What both drivers of a cluster see: functions on ranks that return, raise, and end."""

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from hvdtrain.errors import HvdtrainError

RANKS = 2
Run = Callable[..., list[object]]


def reduced(factor: float, name: str) -> tuple[int, int, float, str]:
    import hvdtrain.torch as hvd

    hvd.init()
    total = hvd.allreduce(torch.tensor([factor * (hvd.rank() + 1)]), op=hvd.Sum)
    return hvd.rank(), hvd.size(), total.item(), name


def see_results(run: Run, folder: Path) -> None:
    found = run(reduced, (2.0,), {"name": "x"})
    total = 2.0 * sum(range(1, RANKS + 1))
    assert found == [(rank, RANKS, total, "x") for rank in range(RANKS)], found


def see_an_exception(run: Run, folder: Path) -> None:
    def failing() -> None:
        import hvdtrain.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise ZeroDivisionError("on purpose")
        time.sleep(600)

    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        run(failing)
    assert caught.value.__notes__[0].startswith("on rank 1 of 2:\nTraceback")


def see_a_rank_without_result(run: Run, folder: Path) -> None:
    def ending() -> None:
        if os.environ["RANK"] == "1":
            os._exit(7)
        time.sleep(600)

    expect(partial(run, ending), "run(): ranks 0, 1 of 2 ended without a result (")


def expect(call: Callable[[], object], text: str) -> None:
    with pytest.raises(HvdtrainError, match=re.escape(text)):
        call()


def see_all(run: Run, more: Sequence[Callable[[Path], None]]) -> None:
    folder = Path(sys.argv[1])
    every = [see_results, see_an_exception, see_a_rank_without_result]
    cases: list[Callable[[Path], None]] = [partial(case, run) for case in every]
    for case in (*cases, *more):
        own = folder / str(len(list(folder.iterdir())))
        own.mkdir()
        case(own)
        print("seen", flush=True)
