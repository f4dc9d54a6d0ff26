"""What test_call.py has ranks import, as they import the modules of a person's project."""

import time


class BoomError(Exception):
    """An exception of this module, which others do not know."""


class UnpicklableError(Exception):
    """Pickle cannot give it its argument again."""

    def __init__(self, *, text: str) -> None:
        super().__init__(text)


def summed(base: float, name: str) -> tuple[int, list[float], str]:
    import torch

    import hvdtrain.torch as hvd

    hvd.init()
    array = hvd.allreduce(torch.full([3], base * (hvd.rank() + 1)), op=hvd.Sum)
    print(f"hello from rank {hvd.rank()}")
    return hvd.rank(), array.tolist(), name


def sleeps() -> None:
    print("sleeps", flush=True)
    time.sleep(3600)
