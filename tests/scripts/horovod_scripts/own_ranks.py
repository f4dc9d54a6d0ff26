"""Starts its own ranks by horovod.run, as pytorch_mnist.py --num-proc does."""

import argparse
import os
import sys

import horovod
from horovod import run
from horovod.common.util import (
    env,
    get_average_backwards_compatibility_fun,
    is_version_greater_equal_than,
)


def main(args: argparse.Namespace, base: int) -> tuple[int, int, float]:
    import horovod.torch as hvd
    import torch

    hvd.init()
    assert hvd.mpi_ops.allreduce is hvd.allreduce
    choose = get_average_backwards_compatibility_fun(hvd.mpi_ops)
    assert [choose(hvd.Max, None), choose(None, None)] == [hvd.Max, hvd.Average]
    with env(HOROVOD_SET="a", HOROVOD_LEFT=None):
        assert (os.environ["HOROVOD_SET"], "HOROVOD_LEFT" in os.environ) == ("a", False)
    assert "HOROVOD_SET" not in os.environ
    summed = hvd.allreduce(torch.tensor([base + hvd.rank()]), op=hvd.Sum)
    return hvd.rank(), hvd.size() * args.factor, summed.item()


if __name__ == "__main__":
    assert horovod.runner.run is run is horovod.run
    assert "torch" not in sys.modules
    newer = ("2.1.0", "2.0.0.1", "2.0", "10.0.0", "2.0.0+cpu", "2.0.0.post1")
    assert all(is_version_greater_equal_than(ver, "2.0.0") for ver in newer)
    older = ("1.13.1", "2.0.0rc1", "2.0.0.dev2", "1.99")
    assert not any(is_version_greater_equal_than(ver, "2.0.0") for ver in older)
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-proc", type=int)
    parser.add_argument("--hosts")
    args = parser.parse_args(namespace=argparse.Namespace(factor=3))
    call = {"args": (args,), "kwargs": {"base": 5}, "num_proc": args.num_proc}
    print(*run(main, **call, hosts=args.hosts, use_mpi=True, use_gloo=False))
