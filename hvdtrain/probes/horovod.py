"""One rank that all-reduces through an installed Horovod: `horovod torch|tensorflow`."""

from __future__ import annotations

import sys

from hvdtrain.collective import collective

_COUNT = 1000


@collective
def main(framework: str) -> None:
    """All-reduce rank + 1 through `horovod.FRAMEWORK` on two ranks."""
    total, size = _torch_sum() if framework == "torch" else _tensorflow_sum()
    if total != [3.0] * _COUNT:
        raise RuntimeError(f"horovod.{framework}: wrong sum on {size} ranks: {total[:3]} ...")


def _torch_sum() -> tuple[list[float], int]:
    import horovod.torch as hvd
    import torch

    hvd.init()
    total = hvd.allreduce(torch.full((_COUNT,), hvd.rank() + 1.0), op=hvd.Sum)
    return total.tolist(), hvd.size()


def _tensorflow_sum() -> tuple[list[float], int]:
    import horovod.tensorflow as hvd
    import tensorflow

    hvd.init()
    total = hvd.allreduce(tensorflow.fill([_COUNT], hvd.rank() + 1.0), op=hvd.Sum)
    return total.numpy().tolist(), hvd.size()


if __name__ == "__main__":
    main(*sys.argv[1:])
