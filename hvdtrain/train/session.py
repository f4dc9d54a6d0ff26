"""The main job: train a recipe on all ranks."""

from __future__ import annotations

import sys
from functools import partial

import torch

from hvdtrain.core import context
from hvdtrain.core.objects import allgather_object, call_on_root
from hvdtrain.errors import UsageError
from hvdtrain.tensors.torch import pin_device
from hvdtrain.torch.shards import own_shards
from hvdtrain.train.agree import call_everywhere, require_same_options
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe import load_recipe
from hvdtrain.train.report import header_lines
from hvdtrain.train.results import Summary
from hvdtrain.train.run import Run
from hvdtrain.train.start import begin
from hvdtrain.train.terminal import Terminal, on_terminal
from hvdtrain.train.torch_loop import TorchLoop, limit_threads

__all__ = ["train"]


def train(options: TrainOptions) -> Summary:
    """Train a recipe and write its results (collective; initialises hvdtrain).

    Every rank gets a summary; its times are the rank's own. Rank 0's is in summary.json.

    Raises:
        UsageError: the options differ between ranks, or do not fit the world, the data, or what
            lies in the directory.
    """
    sharded = options.virtual_shards is not None
    context.init(None if options.engine == "auto" else options.engine, deterministic=sharded)
    world = context.current()
    topology = world.topology
    require_same_options(options)
    _require_usable_lr(options, topology.size)
    if options.virtual_shards is not None:
        own_shards(options.virtual_shards)  # raises where they do not fit
    recipe = load_recipe(options.recipe)
    data = call_everywhere(recipe.load_data)
    if topology.size > len(data.train):
        raise UsageError(
            f"{topology.size} ranks, but {recipe.name} has {len(data.train)} training samples: "
            "start at most one rank per sample"
        )
    device = call_everywhere(partial(pin_device, topology, options.device))
    # The gradient of a shard depends on the number of threads.
    limit_threads(topology, 1 if sharded else recipe.most_threads)
    devices = allgather_object(_device_name(device), "device")
    loop = TorchLoop(recipe, data, options, topology, device)
    start = call_on_root(partial(begin, options, loop.model, loop.optimizer))
    loop.broadcast()
    speaks = topology.rank == 0 and not options.quiet
    with Terminal(speaks, bar=speaks and on_terminal()) as terminal:
        if topology.rank == 0:
            for warning in start.warnings:
                print(f"hvdtrain: {warning}", file=sys.stderr, flush=True)
        directory = str(start.directory)
        terminal.say(header_lines(options, world, data, devices, start.origin, directory))
        return Run(options, world, loop, start, terminal).run()


def _require_usable_lr(options: TrainOptions, size: int) -> None:
    # Adam divides its rate by 0.1 in the first step.
    largest = torch.finfo(getattr(torch, options.dtype)).max / 16
    rate = options.scaled_lr(size)
    if not rate <= largest:
        raise UsageError(
            f"--lr {options.base_lr:g} is {rate:g} when scaled for {size} ranks, too large for "
            f"--dtype {options.dtype}: give a smaller one"
        )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    threads = torch.get_num_threads()
    return f"{device} ({threads} thread{'s' * (threads > 1)})"
