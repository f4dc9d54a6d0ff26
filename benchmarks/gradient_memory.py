"""Measure how much memory gradients take on a rank, as a part of their own size.

python benchmarks/gradient_memory.py                 # two ranks, all models
python benchmarks/gradient_memory.py -np 4 --model resnet50
python benchmarks/gradient_memory.py --whole         # all that a rank takes beyond torch

What counts is what the kernel counts for a process: its own pages, and its part of those that it
shares with others (Pss). It is read whenever a gradient has been computed and not yet been handed
to its parameter, which is when most memory is taken.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

_STEPS = 3
_SAMPLES = 1  # keeps activations small
_ROW = "{:<12}{:>18}{:>18}{:>18}{:>18}{:>18}"


def taken_bytes(*kinds: str) -> int:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(kinds or "Pss:"))


def take_steps(with_hvdtrain: bool) -> None:
    """Train with a script as users have it; print the memory that is no file's, of rank 0."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    meet, rank = bool, 0
    if with_hvdtrain:
        import hvdtrain.torch as hvd

        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        meet, rank = hvd.barrier, hvd.rank()
    for _ in range(_STEPS):
        optimizer.zero_grad()
        model(torch.ones(8, 2048)).square().mean().backward()
        optimizer.step()
    meet()
    taken = taken_bytes("Pss_Anon:", "Pss_Shmem:")
    meet()  # before others end, with whom this rank shares memory
    if rank == 0:
        print(json.dumps({"share": taken}), flush=True)


def compare_ranks(ranks: int) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    alone, taken = start(1, environ, "--whole", 0), start(ranks, environ, "--whole", 1)
    gradients, beyond = 6 * 2048 * 2049 * 4 / 1e6, (taken - alone) / 1e6
    print(
        f"a rank takes {beyond:.1f} MB beyond the {alone / 1e6:.1f} MB of torch alone, "
        f"{ranks * beyond:.1f} MB a node: gradients {gradients:.1f} + {beyond - gradients:.1f} MB"
    )


def measure(name: str, with_hvdtrain: bool, set_to_none: bool) -> float:
    """Train a few steps; return the peak memory of gradients / the bytes of gradients."""
    from hvdtrain_bench.cases.models import MODELS

    import hvdtrain.torch as hvd

    model = MODELS[name]
    module = model.build()
    parameters = list(module.parameters())
    inputs, targets = model.make_batch(_SAMPLES, seed=hvd.rank())
    if name == "resnet50":
        module.eval()  # batch normalization needs more than one sample
    optimizer = torch.optim.SGD(parameters, lr=0.01)

    def backward() -> None:
        model.loss(module(inputs), targets).backward()

    backward()  # triggers lazy initialization
    optimizer.zero_grad()
    gc.collect()
    before = most = taken_bytes()
    if with_hvdtrain:
        optimizer = hvd.DistributedOptimizer(optimizer, module.named_parameters())

    def look(_: torch.Tensor) -> None:
        nonlocal most
        most = max(most, taken_bytes())

    for parameter in parameters:
        parameter.register_hook(look)
    for _ in range(_STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        backward()
        optimizer.step()
        look(inputs)
    return (most - before) / sum(parameter.nbytes for parameter in parameters)


def run_rank(name: str, with_hvdtrain: bool, set_to_none: bool) -> None:
    """Measure on this rank; rank 0 prints the mean of the ranks (collective)."""
    import hvdtrain.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    share = hvd.allreduce(torch.tensor(measure(name, with_hvdtrain, set_to_none)), name="share")
    if hvd.rank() == 0:
        print(json.dumps({"share": share.item()}), flush=True)


def start(ranks: int, environ: Mapping[str, str], *arguments: object) -> float:
    """Start ranks that measure, and return the result of rank 0."""
    run = [sys.executable, "-m", "hvdtrain", "run", "-np", str(ranks), "--", __file__]
    done = subprocess.run(
        [*run, *map(str, arguments)],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return float(json.loads(line)["share"])


def main() -> None:
    """Print a line for each model."""
    from hvdtrain_bench.cases.models import MODELS
    from hvdtrain_bench.harness.results import MODELS as NAMES

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-np", type=int, default=2, help="ranks (2)")
    parser.add_argument("--whole", action="store_true", help="all that a rank takes")
    parser.add_argument("--model", action="append", choices=NAMES, help="by default all")
    options = parser.parse_args()
    if options.whole:
        compare_ranks(options.np)
        return
    # Makes the allocator return freed memory at once.
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    print("the most memory of gradients / the bytes of all gradients, by what zero_grad() leaves")
    columns = ("torch, None", "hvdtrain, None", "torch, zeros", "hvdtrain, zeros")
    print(_ROW.format("model", *columns, "largest gradient"))
    for name in options.model or NAMES:
        shares = [
            start(options.np, environ, "--rank", name, int(ours), int(none))
            for none in (1, 0)
            for ours in (0, 1)
        ]
        sizes = [parameter.nbytes for parameter in MODELS[name].build().parameters()]
        shares.append(max(sizes) / sum(sizes))
        print(_ROW.format(name, *(f"{share:.2f}" for share in shares)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--whole"] and len(sys.argv) == 3:
        take_steps(sys.argv[2] == "1")
    elif sys.argv[1:2] == ["--rank"]:
        run_rank(sys.argv[2], sys.argv[3] == "1", sys.argv[4] == "1")
    else:
        main()
